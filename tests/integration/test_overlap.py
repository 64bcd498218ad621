"""--overlap-grad-reduce and --overlap-param-gather: same numbers, and reductions that leave in time."""

from pathlib import Path

import pytest

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.recorded import Measured, RecordedStep
from megatron_pp_ext.view import trace_file
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import first
from tests.support.training import since, train

PP2_DP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--clip-grad", "0")
REDUCE = ("--overlap-grad-reduce",)
SHARDED = ("--use-distributed-optimizer",)
GATHER = (*SHARDED, *REDUCE, "--overlap-param-gather")
UNALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
SMALL_BUCKETS = ("--ddp-bucket-size", "1000")
FLEX = "flex --pipeline-memory-limit 0.75"


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["v-half", "1f1b", "interleaved", "zb-h1", "v-zb", FLEX])
def test_reducing_bucket_by_bucket_changes_nothing(schedule: str) -> None:
    flags = (*REDUCE, *UNALIGNED, *SMALL_BUCKETS, "--pipeline-schedule", *schedule.split())
    assert_same_bits(run(4, [*PP2_DP2, *flags]), stock(4, *PP2_DP2))


@pytest.mark.parametrize(
    ("name", "align"),
    first(
        1, [("v-half", UNALIGNED), ("interleaved", ()), ("v-half", ()), ("zb-h1", UNALIGNED), ("1f1b", ())]
    ),
)
def test_gathering_early_changes_nothing(name: str, align: tuple[str, ...]) -> None:
    """Evaluation stands between two steps: it must find whole weights and leave the hooks in order."""
    evaluation = ("--eval-interval", "2", "--eval-iters", "1")
    ours = run(4, [*PP2_DP2, *evaluation, *GATHER, *align, "--pipeline-schedule", name])
    theirs = stock(4, *PP2_DP2, *evaluation, *SHARDED)
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


@pytest.mark.wide
@since((0, 18), "megatron-core before 0.18 refuses --rampup-batch-size beside --train-iters")
def test_a_step_with_another_number_of_microbatches() -> None:
    """Which action is a chunk's last changes with the schedule; what it counts must not."""
    ramp = ("--rampup-batch-size", "4", "4", "8", "--train-iters", "4", *REDUCE, "--no-align-grad-reduce")
    ours = run(4, [*PP2_DP2, *ramp, "--pipeline-schedule", "dualpipe-v"])
    assert_same_bits(ours, stock(4, *PP2_DP2, *ramp))


def recorded(file: Path, *flags: str) -> RecordedStep:
    traced = ("--pipeline-trace", str(file), "--train-iters", "2")
    train(4, [*PP2_DP2, *traced, "--pipeline-schedule", "v-half", *flags])
    return trace_file.read(file)


def last_of_chunks(step: RecordedStep, rank: int, kind: Kind) -> list[Measured]:
    """The last action of this kind of each chunk of ``rank``."""
    found = {
        step.placement.chunk_of(event.action.stage): event
        for event in step.records[rank].events
        if event.action.kind is kind
    }
    return [found[chunk] for chunk in range(step.placement.chunks)]


def test_a_chunk_leaves_in_its_last_weight_gradient(tmp_path: Path) -> None:
    step = recorded(tmp_path / "trace.json", *REDUCE)
    for rank, record in enumerate(step.records):
        last = last_of_chunks(step, rank, Kind.W)
        assert {reduction.chunk for reduction in record.reductions} == {0, 1}
        assert all(last[chunk].start < start <= last[chunk].end for chunk, start, _ in record.reductions)
        # The chunk that is done first travels while the other still computes.
        first = min(record.reductions, key=lambda reduction: reduction.start)
        assert first.start < record.events[-1].start < first.end


def test_a_bucket_leaves_when_it_is_full(tmp_path: Path) -> None:
    """Of the first chunk, which alone has several: one of norms alone in its last I, the others in W."""
    step = recorded(tmp_path / "trace.json", *REDUCE, *UNALIGNED, *SMALL_BUCKETS)
    last_input, last_weight = (last_of_chunks(step, 0, kind)[0] for kind in (Kind.I, Kind.W))
    starts = sorted(reduction.start for reduction in step.records[0].reductions if reduction.chunk == 0)
    assert all(last_input.start < start < last_weight.end for start in starts)
    in_weight = [start for start in starts if start > last_weight.start]
    assert len(in_weight) > 2


@pytest.mark.wide
def test_without_the_flag_everything_leaves_at_the_end(tmp_path: Path) -> None:
    for record in recorded(tmp_path / "trace.json").records:
        assert len(record.reductions) == 2
        assert all(reduction.start >= record.events[-1].end for reduction in record.reductions)
