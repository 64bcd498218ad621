"""Costs of stages with attention of another kind: the same from a model's config as from its flags."""

import pytest
from megatron.training.arguments import core_transformer_config_from_args

from megatron_pp_ext import cpu
from megatron_pp_ext.costs.stages import stage_costs
from megatron_pp_ext.job import model_config
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.placement import linear
from tests.support.flags import estimated_costs, validated
from tests.support.training import TINY

MODELS = {
    "latent": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --mla-down-proj-fusion --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights",
    "windowed": "--window-size 7,0 --window-attn-skip-freq 2 --softmax-type learnable --qk-layernorm "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --kv-channels 16",
    "linear": "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,0]*2+[1,0] "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--attention-output-gate --position-embedding-type rope --disable-bias-linear --swiglu",
}
OF_MODEL = (
    "micro_batch_size",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
    "transformer_impl",
)
"""What the settings of a call take from the model, and not from its config."""


@pytest.mark.parametrize("model", MODELS)
def test_costs_from_a_config_are_those_from_flags(model: str) -> None:
    flags = f"{MODELS[model]} --transformer-impl transformer_engine"
    args, _ = validated([*cpu.with_cpu_flags([*TINY, *flags.split()]), "--mock-data"], 1)
    known = {name: getattr(args, name) for name in OF_MODEL}
    found = model_config.arguments(core_transformer_config_from_args(args), **known)
    assert stage_costs(Job.of(found), linear(4), 64) == estimated_costs(flags, 4)
    assert estimated_costs(flags, 4) != estimated_costs("--transformer-impl transformer_engine", 4)


def test_layers_that_differ_make_stages_that_do() -> None:
    """Layers 3, 6 and 8 attend to all tokens; the others have the same linear attention."""
    stages = estimated_costs(f"{MODELS['linear']} --transformer-impl transformer_engine", 8).stages
    seconds = [stage.forward for stage in stages[:-1]]
    assert len(set(seconds)) == 2
    assert seconds[2] == seconds[5] != seconds[1]
