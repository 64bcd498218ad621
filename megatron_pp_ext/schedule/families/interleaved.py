"""Interleaved 1F1B: several chunks a rank (arXiv 2104.04473, section 2.2, figure 4; Megatron-LM).

The pipeline runs through the ranks ``chunks`` times.  A rank takes microbatches in groups of p:
a group's forwards on its first chunk, then the same group's on its second, and so on; backwards
likewise from its last chunk to its first.  The bubble of 1F1B is divided by the number of chunks;
memory and messages grow.

Where p does not divide m the last group is short, which Megatron-LM refuses.  Here the order is
for the next multiple of p with the missing microbatches left out: no rank then waits for
anything it did not wait for before, so the order stays free of deadlock.

With pairs, a forward and a backward run together (Megatron-LM with --overlap-moe-expert-parallel-comm;
``get_pp_rank_microbatches`` in megatron.core.pipeline_parallel.schedules).  One forward more in the warm-up
lets the two of a pair not need each other.

With the backward in two halves (arXiv 2401.10241; torch's ScheduleInterleavedZeroBubble) a gradient
comes back one action a rank instead of two: ranks need half as many forwards to bridge the wait,
and W, r chunks after I, fills the bubbles at the end.  With one chunk this would be ZB-H1.
"""

from itertools import chain

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.phases import alternating
from megatron_pp_ext.schedule.placement import Placement, loop


def build(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B for ranks >= 2, microbatches >= 1 and chunks >= 2.

    At unit cost and m a multiple of p the makespan is 3(m * chunks + p - 1) chunk actions.
    """
    placement = loop(ranks, chunks)
    orders = tuple(_order(rank, placement, microbatches)[0] for rank in range(ranks))
    return Schedule("interleaved", placement, microbatches, orders)


def build_paired(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with pairs, for the same sizes; it keeps up to one chunk more than without."""
    placement = loop(ranks, chunks)
    orders, paired = zip(
        *(_order(rank, placement, microbatches, one_more=1) for rank in range(ranks)), strict=True
    )
    return Schedule("interleaved", placement, microbatches, orders, frozenset(chain.from_iterable(paired)))


def build_zero_bubble(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved with a split backward for ranks >= 2, microbatches >= 1 and chunks >= 2.

    At unit cost and m a multiple of p the makespan is 3m * chunks + p - 1 chunk actions and the
    peak p * chunks chunks: 1F1B's memory.
    """
    placement = loop(ranks, chunks)
    orders = tuple(_split_order(rank, placement, microbatches) for rank in range(ranks))
    return Schedule("interleaved-zb", placement, microbatches, orders)


def _order(
    rank: int, placement: Placement, microbatches: int, one_more: int = 0
) -> tuple[tuple[Action, ...], list[Action]]:
    """Return the order of ``rank``, and the forwards of its steady state that have a backward after them."""
    ranks, chunks = placement.ranks, placement.chunks
    downwards = placement.stages_of(rank)
    groups = -(-microbatches // ranks)
    forwards = _in_groups(Kind.F, downwards, ranks, groups)
    backwards = _in_groups(Kind.B, downwards[::-1], ranks, groups)
    warm_up = (ranks - rank - 1) * 2 + (chunks - 1) * ranks + one_more
    steady = zip(forwards[warm_up:], backwards, strict=False)
    return (
        tuple(
            action for action in alternating(forwards, backwards, warm_up) if action.microbatch < microbatches
        ),
        [f for f, b in steady if max(f.microbatch, b.microbatch) < microbatches],
    )


def _split_order(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    ranks, downwards = placement.ranks, placement.stages_of(rank)
    groups = -(-microbatches // ranks)
    forwards = _in_groups(Kind.F, downwards, ranks, groups)
    backwards = _in_groups(Kind.I, downwards[::-1], ranks, groups)
    warm_up = (ranks - rank - 1) + (placement.chunks - 1) * ranks

    order = forwards[:warm_up]
    for step, backward in enumerate(backwards):
        order += [*forwards[warm_up + step : warm_up + step + 1], backward]
        if step >= rank:
            order.append(backwards[step - rank]._replace(kind=Kind.W))
    order += [backward._replace(kind=Kind.W) for backward in backwards[len(backwards) - rank :]]
    return tuple(action for action in order if action.microbatch < microbatches)


def _in_groups(kind: Kind, stages: tuple[int, ...], ranks: int, groups: int) -> list[Action]:
    return [
        Action(stage, kind, microbatch)
        for group in range(groups)
        for stage in stages
        for microbatch in range(group * ranks, (group + 1) * ranks)
    ]
