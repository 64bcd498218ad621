"""1F1B, the schedule of PipeDream-flush (arXiv 2006.09503, figure 2b; Megatron-LM's default).

Three phases a rank: forwards until its first gradient is due, one forward and one backward in
turn, and the backwards that are left.  Rank r keeps p - r microbatches, whatever m is.

With pairs, one forward and one backward run together and send their outputs together.  Between two ranks a
microbatch then goes forward in one pair and comes back in another, where the plain order needs a forward and
a backward of one.  So rank r begins with twice the distance to the last rank, and with one forward more, so
that the two of a pair do not need each other: Megatron-LM's own warm-up for interleaved stages
(``get_pp_rank_microbatches`` in megatron.core.pipeline_parallel.schedules with
overlap_moe_expert_parallel_comm), with one chunk.  Rank r keeps 2(p - r) microbatches.
"""

from collections.abc import Sequence

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.requirements import require_pipeline
from megatron_pp_ext.schedule.names import NO_PIPELINE
from megatron_pp_ext.schedule.placement import linear


def build(ranks: int, microbatches: int) -> Schedule:
    """1F1B for any ranks >= 2 and microbatches >= 1; makespan 3(m + p - 1) at unit cost, peak min(p, m)."""
    require_pipeline("1f1b", ranks, microbatches)
    return _schedule("1f1b", [ranks - rank - 1 for rank in range(ranks)], microbatches, is_paired=False)


def build_paired(ranks: int, microbatches: int) -> Schedule:
    """1F1B with pairs for any ranks >= 2 and microbatches >= 1; peak min(2p, m)."""
    require_pipeline("1f1b", ranks, microbatches)
    return _schedule("1f1b", [2 * (ranks - rank) - 1 for rank in range(ranks)], microbatches, is_paired=True)


def alone(microbatches: int, is_paired: bool = False) -> Schedule:
    """Return what Megatron-LM does without a pipeline: every backward is behind its forward.

    With pairs, one of the microbatch before runs with the forward
    (``combined_1f1b_schedule_for_no_pipelining`` in megatron.core.pipeline_parallel.combined_1f1b).
    """
    return _schedule(NO_PIPELINE, [int(is_paired)], microbatches, is_paired)


def _schedule(name: str, warm_ups: Sequence[int], microbatches: int, is_paired: bool) -> Schedule:
    """Return the schedule in which each rank begins with so many forwards, and may pair the others."""
    orders = tuple(_order(rank, warm_up, microbatches) for rank, warm_up in enumerate(warm_ups))
    paired = frozenset(
        Action(rank, Kind.F, microbatch)
        for rank, warm_up in enumerate(warm_ups)
        for microbatch in range(warm_up if is_paired else microbatches, microbatches)
    )
    return Schedule(name, linear(len(warm_ups)), microbatches, orders, paired)


def _order(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(rank, Kind.F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, Kind.B, microbatch) for microbatch in range(microbatches)]
    warm_up = min(warm_up, microbatches)

    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[microbatches - warm_up :]
    return tuple(order)
