"""The numbers of data-parallel ranks and of microbatches that flags imply."""

import pytest

from megatron_pp_ext.job import sizes
from megatron_pp_ext.job.typed_job import Job

FLAGS = {
    "pipeline_model_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_replicas": None,
    "pipeline_schedule": None,
    "expert_tensor_parallel_size": None,
    "num_experts": None,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "seq_length": 64,
    "sequence_parallel": True,
    "global_batch_size": 24,
    "micro_batch_size": 3,
    "decrease_batch_size_if_needed": False,
}


def flags(**changed: object) -> Job:
    return Job().changed(**{**FLAGS, **changed})


def test_ranks_are_shared_by_tensor_pipeline_and_context_parallelism() -> None:
    assert sizes.data_parallel_size(flags(), 8) == 2
    assert sizes.data_parallel_size(flags(context_parallel_size=2), 8) == 1
    with pytest.raises(ValueError, match=r"10 GPUs .* 2 x 2 x 1 = 4: nearest that work are 8 or 12"):
        sizes.data_parallel_size(flags(), 10)
    with pytest.raises(ValueError, match="nearest that work are 4"):
        sizes.data_parallel_size(flags(), 3)


def test_microbatches_of_a_step() -> None:
    assert sizes.microbatches(flags(), 2) == 4
    assert sizes.microbatches(flags(), 1) == 8
    with pytest.raises(ValueError, match=r"global-batch-size 24 .* nearest that work are 15 or 30"):
        sizes.microbatches(flags(), 5)
    assert sizes.microbatches(flags(decrease_batch_size_if_needed=True), 5) == 1
    with pytest.raises(ValueError, match=r"makes 0 microbatches .* set it to 27 or more"):
        sizes.microbatches(flags(), 9)


def test_a_growing_batch_is_planned_at_its_largest() -> None:
    """Most steps have it, and no step keeps more."""
    growing = flags(global_batch_size=None, step_batch_size_schedule="0:6 100:12 500:36")
    assert sizes.microbatches(growing, 2) == 6
    assert sizes.microbatches(flags(global_batch_size=None), 2) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 7}, "does not divide --num-attention-heads 7"),
        ({"num_query_groups": 3}, "does not divide --num-query-groups 3"),
        ({"context_parallel_size": 2, "seq_length": 66}, "does not divide half of --seq-length 66"),
        ({"seq_length": 65}, "does not divide a rank's part of --seq-length 65"),
        ({"num_experts": 6, "expert_model_parallel_size": 4}, "does not divide --num-experts 6"),
    ],
)
def test_parts_of_the_model_are_equal(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes.require_divisible(flags(**changed), 8)


def test_experts_have_tensor_parallel_ranks_of_their_own() -> None:
    """On 4 ranks of a stage: 2 x 2 by default, 4 x 1 if each expert is on one rank, and not 4 x 2."""
    experts = {"num_experts": 8}
    sizes.require_divisible(flags(**experts, expert_model_parallel_size=2), 4)
    sizes.require_divisible(flags(**experts, expert_model_parallel_size=4, expert_tensor_parallel_size=1), 4)
    with pytest.raises(ValueError, match=r"expert parallelism of 8 .* does not divide the 4 ranks"):
        sizes.require_divisible(flags(**experts, expert_model_parallel_size=4), 4)
