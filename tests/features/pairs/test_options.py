"""Which requests get pairs by Megatron's flag, and what follows from it."""

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.pairs.order import Pairs, request_in_pairs
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.model_description import asked_of, describe

MODEL = {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "micro_batch_size": 1,
    "vocab_size": 64, "max_position_embeddings": 64, "bf16": True, "num_experts": 4, "moe_router_topk": 2,
    "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2,
    "global_batch_size": 8, "overlap_moe_expert_parallel_comm": True,
}  # fmt: skip
CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}


@pytest.mark.parametrize(
    ("flags", "has_pairs"),
    [
        ({"pipeline_model_parallel_size": 1}, True),
        ({"pipeline_model_parallel_size": 2, **CHUNKS}, True),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}, True),
        ({"overlap_moe_expert_parallel_comm": False, "pipeline_schedule": "1f1b"}, False),
    ],
)
def test_the_flag_is_read(flags: dict[str, object], has_pairs: bool) -> None:
    request = for_world(asked_of(describe({**MODEL, "pipeline_model_parallel_size": 2, **flags})), 4)
    assert (request.option(Pairs) is not None) == has_pairs
    assert bool(make(request).schedule.paired) == has_pairs
    assert request.may_split_backward == has_pairs  # none of these orders has halves of a backward


def test_pairs_are_asked_for_once() -> None:
    request = request_in_pairs(named("dualpipe-v", 2, 8))
    assert request.with_option(Pairs()) == request
    assert request_in_pairs(named("dualpipe-v", 2, 8), is_paired=False) == named("dualpipe-v", 2, 8)


def test_a_family_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="leave pairs out, or use one of: 1f1b"):
        make(request_in_pairs(named("zb-h1", 2, 8)))
