"""1F1B, the schedule of PipeDream-flush (arXiv 2006.09503, figure 2b; Megatron-LM's default).

Three phases a rank: forwards until its first gradient is due, one forward and one backward in
turn, and the backwards that are left.  Rank r keeps p - r microbatches, whatever m is.
"""

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.requirements import require_pipeline
from megatron_pp_ext.schedule.placement import linear


def build(ranks: int, microbatches: int) -> Schedule:
    """1F1B for any ranks >= 2 and microbatches >= 1; makespan 3(m + p - 1) at unit cost, peak min(p, m)."""
    require_pipeline("1f1b", ranks, microbatches)
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("1f1b", linear(ranks), microbatches, orders)


def _order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(rank, Kind.F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(rank, Kind.B, microbatch) for microbatch in range(microbatches)]
    warm_up = min(ranks - rank - 1, microbatches)

    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[microbatches - warm_up :]
    return tuple(order)
