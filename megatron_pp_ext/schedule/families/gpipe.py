"""GPipe: all forwards, then all backwards (arXiv 1811.06965, figure 2c).

The shortest description of a pipeline and the largest memory: every rank keeps all m
microbatches.  Backwards run in the order of the forwards, where the figure reverses it, so that
gradients are summed in microbatch order as in all families here; the length is the same.

Breadth-first pipeline parallelism (arXiv 2211.05953) is the same with several chunks a
rank in a loop: all microbatches through one chunk before any goes through the next, which divides
the bubble by the number of chunks and lets sharded parameters be gathered once a chunk.
"""

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import Placement, linear, loop


def build(ranks: int, microbatches: int) -> Schedule:
    """GPipe for any ranks >= 2 and microbatches >= 1; makespan 3(m + p - 1) at unit cost."""
    return Schedule("gpipe", linear(ranks), microbatches, _orders(linear(ranks), microbatches))


def build_breadth_first(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Breadth-first for ranks >= 2, microbatches >= 1 and chunks >= 2.

    At unit cost and m >= p the makespan is 3(m * chunks + p - 1) chunk actions.
    """
    placement = loop(ranks, chunks)
    return Schedule("breadth-first", placement, microbatches, _orders(placement, microbatches))


def _orders(placement: Placement, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    numbers = range(microbatches)
    return tuple(
        (
            *(Action(stage, Kind.F, i) for stage in placement.stages_of(rank) for i in numbers),
            *(Action(stage, Kind.B, i) for stage in placement.stages_of(rank)[::-1] for i in numbers),
        )
        for rank in range(placement.ranks)
    )
