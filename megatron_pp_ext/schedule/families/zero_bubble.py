"""ZB-H1 and ZB-H2: the backward in two halves (arXiv 2401.10241, section 2, figure 3).

Only the input gradient (I) is awaited by the rank before; the weight gradient (W) can be done at
any later time, so it is kept back to fill the bubbles at the end.  Both schedules are one shape,
and one number distinguishes them: how many microbatches a rank may keep beyond 1F1B's p.

H1 keeps none.  Rank r warms up with 1F1B's p - r forwards and runs W r microbatches after I,
so that every rank needs rank 0's memory.

H2 keeps p - 1.  Every rank fills the whole time until its first gradient arrives, 2(p - r) - 1
forwards, and runs W 2r later: from its first action to its last no rank ever waits.
"""

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import linear


def build_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 for any ranks >= 2 and microbatches >= 1.

    At unit cost: makespan 3m + p - 1 for m >= p, peak min(p, m).
    """
    return _build("zb-h1", ranks, microbatches, more=0)


def build_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 for any ranks >= 2 and microbatches >= 1.

    At unit cost: makespan 3m + p - 1 for m >= p, span 3m for m >= 2p - 1, peak min(2p - 1, m).
    With fewer microbatches than 2p - 1 it is the shape between H1 and H2 that m microbatches
    fill; a whole H2 would keep W back for forwards that do not exist.
    """
    return _build("zb-h2", ranks, microbatches, more=min(max(microbatches - ranks, 0), ranks - 1))


def _build(name: str, ranks: int, microbatches: int, more: int) -> Schedule:
    """Build the shape in which a rank keeps at most p + ``more`` microbatches."""
    orders = tuple(
        _order(
            rank,
            microbatches,
            warm_up=ranks - rank + min(more, ranks - rank - 1),
            delay=rank + min(more, rank),
        )
        for rank in range(ranks)
    )
    return Schedule(name, linear(ranks), microbatches, orders)


def _order(rank: int, microbatches: int, warm_up: int, delay: int) -> tuple[Action, ...]:
    """Run I in turn with the forwards that the warm-up leaves, and W ``delay`` microbatches after I."""
    order = [Action(rank, Kind.F, microbatch) for microbatch in range(min(warm_up, microbatches))]
    for microbatch in range(microbatches):
        order.append(Action(rank, Kind.I, microbatch))
        if microbatch >= delay:
            order.append(Action(rank, Kind.W, microbatch - delay))
        if microbatch + warm_up < microbatches:
            order.append(Action(rank, Kind.F, microbatch + warm_up))
    remaining = range(max(microbatches - delay, 0), microbatches)
    order += [Action(rank, Kind.W, microbatch) for microbatch in remaining]
    return tuple(order)
