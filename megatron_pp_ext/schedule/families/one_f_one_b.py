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

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.phases import alternating
from megatron_pp_ext.schedule.placement import linear


def build(ranks: int, microbatches: int) -> Schedule:
    """1F1B for any ranks >= 2 and microbatches >= 1; makespan 3(m + p - 1) at unit cost, peak min(p, m)."""
    orders = tuple(_order(rank, ranks - rank - 1, microbatches) for rank in range(ranks))
    return Schedule("1f1b", linear(ranks), microbatches, orders)


def build_paired(ranks: int, microbatches: int) -> Schedule:
    """1F1B with pairs for any ranks >= 2 and microbatches >= 1; peak min(2p, m)."""
    warm_ups = [2 * (ranks - rank - 1) + 1 for rank in range(ranks)]
    orders = tuple(_order(rank, warm_up, microbatches) for rank, warm_up in enumerate(warm_ups))
    paired = frozenset(
        Action(rank, Kind.F, microbatch)
        for rank, warm_up in enumerate(warm_ups)
        for microbatch in range(warm_up, microbatches)
    )
    return Schedule("1f1b", linear(ranks), microbatches, orders, paired)


def _order(rank: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(rank, Kind.F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, Kind.B, microbatch) for microbatch in range(microbatches)]
    return tuple(alternating(forwards, backwards, warm_up))
