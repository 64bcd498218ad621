"""Reductions of gradients in a trace, beside bucket groups that do nothing."""

from types import SimpleNamespace

from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.megatron.runners.tracing import (
    record_reduction_end,
    record_reduction_start,
    reporting_to,
)
from megatron_pp_ext.runtime.recorder import StepRecorder


class Group:
    """A bucket group; its functions are hooked as Megatron's are."""

    def start_grad_sync(self, force_all_reduce: bool = False) -> str:
        return "started"

    def finish_grad_sync(self, force_all_reduce: bool = False) -> str:
        return "finished"

    start_grad_sync = record_reduction_start(start_grad_sync)
    finish_grad_sync = record_reduction_end(finish_grad_sync)


def chunk(dense: int, experts: int) -> SimpleNamespace:
    groups = [Group() for _ in range(dense + experts)]
    return SimpleNamespace(bucket_groups=groups[:dense], expert_parallel_bucket_groups=groups[dense:])


def reduce_all(model: list) -> None:
    groups = [group for one in model for group in (*one.bucket_groups, *one.expert_parallel_bucket_groups)]
    assert {group.start_grad_sync() for group in groups} == {"started"}
    assert {group.finish_grad_sync(force_all_reduce=True) for group in groups} == {"finished"}


def test_reductions_of_all_buckets_have_their_chunk() -> None:
    """Buckets of experts count too, and only within the step that is recorded."""
    model = [chunk(2, 1), chunk(1, 3)]
    recorder = StepRecorder()
    reduce_all(model)
    with reporting_to(recorder, model):
        reduce_all(model)
    reduce_all(model)
    assert [reduction.chunk for reduction in recorder.record.reductions] == [0, 0, 0, 1, 1, 1, 1]
    assert all(reduction.start <= reduction.end for reduction in recorder.record.reductions)
    assert tracing._recorder is None
