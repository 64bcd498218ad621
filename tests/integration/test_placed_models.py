"""Which models a schedule refuses to place, before any of their layers is made."""

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

CHUNKS = {"v-half": 2, "1f1b": 1}


def build_in_own_groups(rank: int) -> dict[str, str]:
    """Return what refuses models that bring process groups while Megatron's global ones are not made."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_pp_ext
    from megatron_pp_ext.megatron import requested
    from megatron_pp_ext.megatron.core.placed_models import require_sizes

    dist.init_process_group("gloo")
    found = {}
    for name, chunks in CHUNKS.items():
        several = chunks if chunks > 1 else None
        with megatron_pp_ext.installed(name, ranks=2, microbatches=4):
            config = TransformerConfig(
                num_layers=4,
                hidden_size=16,
                num_attention_heads=2,
                pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
                virtual_pipeline_model_parallel_size=several,
            )
            groups = ProcessGroupCollection(pp=dist.group.WORLD)
            spec = get_gpt_layer_local_spec()
            try:
                if chunks > 1:
                    GPTModel(config, spec, 32, 8, pg_collection=groups, vp_stage=0)
                else:
                    require_sizes(requested.require(), groups.pp.size(), config, None)
                found[name] = ""
            except ValueError as error:
                found[name] = str(error)
    return found


def test_a_v_needs_global_process_groups() -> None:
    for found in run_ranks(build_in_own_groups, 2):
        assert found["1f1b"] == ""
        assert "\n" not in found["v-half"]
        assert found["v-half"].startswith("v-half needs Megatron's global process groups (parallel_state)")
        assert "leave use_decentralized_pg out, or choose a schedule with one chunk a rank" in found["v-half"]
