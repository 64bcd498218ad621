"""Which models a schedule refuses to place, before any of their layers is made."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines, placed_models
from megatron_pp_ext.schedule.placement import Placement, Shape
from tests.support.ranks import run_ranks

CHUNKS = {"v-half": 2, "1f1b": 1}


def build_in_own_groups(rank: int) -> dict[str, str]:
    """Return what refuses models that bring process groups while Megatron's global ones are not made."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_pp_ext
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


SHAPES = ((Shape.LINEAR, 1), (Shape.LOOP, 3), (Shape.V, 2), (Shape.WAVE, 3), (Shape.WAVE, 4))
PLACEMENTS = [Placement(shape, ranks, chunks) for ranks in (2, 3, 8) for shape, chunks in SHAPES]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes this process a rank of a pipeline under a ``placement``."""
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", None)

    def be(placement: Placement, rank: int) -> requested.Pipeline:
        chunks = placement.chunks if placement.chunks > 1 else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        parallel_state.set_pipeline_model_parallel_world_size(placement.ranks)
        parallel_state.set_pipeline_model_parallel_rank(rank)
        request = Request("v-half", (placement,), 8, True)
        made = SimpleNamespace(name="v-half", placement=placement)
        pipeline = requested.Pipeline(request, made, is_per_model=True)
        requested.activate(pipeline)
        return pipeline

    yield be
    requested.activate(None)


def config_of(placement: Placement) -> TransformerConfig:
    """Return a config of two layers a stage."""
    return TransformerConfig(
        num_layers=2 * placement.stages,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=placement.ranks,
        virtual_pipeline_model_parallel_size=placement.chunks if placement.chunks > 1 else None,
    )


def told(config: TransformerConfig, vp_stage: int | None, **about: int) -> tuple:
    """Return what the functions say of a chunk: its layers, counted from 0, and the two ends."""
    offset = transformer_layer.get_transformer_layer_offset(config, vp_stage=vp_stage, **about)
    count = transformer_block.get_num_layers_to_build(config, vp_stage=vp_stage, **about)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, False, vp_stage=vp_stage, **about)
    assert len(spec.layer_specs) == count
    return offset, count


def ends(vp_stage: int | None) -> tuple[bool, bool]:
    asked = {"ignore_virtual": False, "vp_stage": vp_stage}
    return parallel_state.is_pipeline_first_stage(**asked), parallel_state.is_pipeline_last_stage(**asked)


def contexts(placement: Placement) -> Iterator[object]:
    """Yield the contexts of a rank's chunks: what one asks in another one's must not matter."""
    yield placed_models.as_chunk(None)
    yield from (placed_models.as_chunk(chunk) for chunk in range(placement.chunks))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: f"{one.shape}-{one.ranks}x{one.chunks}")
def test_functions_answer_for_the_chunk_that_is_asked_about(as_rank, placement: Placement) -> None:
    for rank in range(placement.ranks):
        as_rank(placement, rank)
        config = config_of(placement)
        for context in contexts(placement):
            with context:
                for chunk, stage in enumerate(placement.stages_of(rank)):
                    vp_stage = chunk if placement.chunks > 1 else None
                    assert told(config, vp_stage) == (2 * stage, 2)
                    assert ends(vp_stage) == (stage == 0, stage == placement.stages - 1)
        assert parallel_state.get_pipeline_model_parallel_rank() == rank


@pytest.mark.parametrize("placement", [Placement(Shape.V, 4, 2), Placement(Shape.LOOP, 4, 2)], ids=str)
def test_a_given_rank_is_a_true_one_unless_a_mirror_told_it(as_rank, placement: Placement) -> None:
    """Exporters ask about all ranks by number; Megatron's own layers by the group of their chunk."""
    as_rank(placement, 1)
    config = config_of(placement)
    for rank in range(4):
        for chunk, stage in enumerate(placement.stages_of(rank)):
            assert told(config, chunk, pp_rank=rank) == (2 * stage, 2)
            if placement.is_mirrored(chunk):
                assert told(config, chunk, pp_rank=placed_models.mirror(rank, 4)) == (2 * stage, 2)


def test_a_config_answers_for_its_own_pipeline(as_rank) -> None:
    """Whatever is in force when the question comes."""
    placed = as_rank(Placement(Shape.V, 4, 2), 0)
    # The ends of a whole rank stay stock: Megatron looks for losses on the last, where they are brought to.
    assert parallel_state.is_pipeline_first_stage(vp_stage=1)
    assert not parallel_state.is_pipeline_last_stage(vp_stage=1)
    config = config_of(placed.placement)
    requested.activate(None)
    assert transformer_layer.get_transformer_layer_offset(config, vp_stage=1) == 14
    assert chunk_pipelines.of_config(SimpleNamespace()) is None


def test_without_a_pipeline_functions_are_stock(as_rank) -> None:
    as_rank(Placement(Shape.V, 4, 2), 0)
    requested.activate(None)
    config = config_of(Placement(Shape.V, 4, 2))
    assert told(config, 1) == (8, 2)
    assert ends(1) == (False, False)


def test_a_mirrored_rank_is_written_as_a_number() -> None:
    copied = pickle.loads(pickle.dumps(placed_models.mirror(1, 4)))
    assert (type(copied), copied) == (int, 2)
