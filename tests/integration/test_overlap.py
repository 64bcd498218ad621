"""--overlap-grad-reduce and --overlap-param-gather: same numbers, and reductions that leave in time."""

import pytest

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.recorded import Measured, RecordedStep
from tests.support.comparison import assert_same_bits, run, stock, traced
from tests.support.tiers import first

PP2_DP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--clip-grad", "0")
REDUCE = ("--overlap-grad-reduce",)
SHARDED = ("--use-distributed-optimizer",)
GATHER = (*SHARDED, *REDUCE, "--overlap-param-gather")
UNALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
SMALL_BUCKETS = ("--ddp-bucket-size", "1000")


@pytest.mark.parametrize(("name", "align"), first(1, [("v-half", UNALIGNED), ("interleaved", ())]))
def test_gathering_early_changes_nothing(name: str, align: tuple[str, ...]) -> None:
    """Evaluation stands between two steps: it must find whole weights and leave the hooks in order."""
    evaluation = ("--eval-interval", "2", "--eval-iters", "1")
    ours = run(4, [*PP2_DP2, *evaluation, *GATHER, *align, "--pipeline-schedule", name])
    theirs = stock(4, *PP2_DP2, *evaluation, *SHARDED)
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


def last_of_chunks(step: RecordedStep, rank: int, kind: Kind) -> list[Measured]:
    """The last action of this kind of each chunk of ``rank``."""
    found = {
        step.placement.chunk_of(event.action.stage): event
        for event in step.records[rank].events
        if event.action.kind is kind
    }
    return [found[chunk] for chunk in range(step.placement.chunks)]


def test_a_chunk_leaves_in_its_last_weight_gradient() -> None:
    step = traced(4, [*PP2_DP2, "--pipeline-schedule", "v-half", *REDUCE])
    for rank, record in enumerate(step.records):
        last = last_of_chunks(step, rank, Kind.W)
        assert {reduction.chunk for reduction in record.reductions} == {0, 1}
        assert all(last[chunk].start < start <= last[chunk].end for chunk, start, _ in record.reductions)
        # The chunk that is done first travels while the other still computes.
        first = min(record.reductions, key=lambda reduction: reduction.start)
        assert first.start < record.events[-1].start < first.end


def test_a_bucket_leaves_when_it_is_full() -> None:
    """Of the first chunk, which alone has several: one of norms alone in its last I, the others in W."""
    step = traced(4, [*PP2_DP2, "--pipeline-schedule", "v-half", *REDUCE, *UNALIGNED, *SMALL_BUCKETS])
    last_input, last_weight = (last_of_chunks(step, 0, kind)[0] for kind in (Kind.I, Kind.W))
    starts = sorted(reduction.start for reduction in step.records[0].reductions if reduction.chunk == 0)
    assert all(last_input.start < start < last_weight.end for start in starts)
    in_weight = [start for start in starts if start > last_weight.start]
    assert len(in_weight) > 2
