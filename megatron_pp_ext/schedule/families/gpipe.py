"""GPipe: all forwards, then all backwards (arXiv 1811.06965, figure 2c).

The shortest description of a pipeline and the largest memory: every rank keeps all m
microbatches.  Backwards run in the order of the forwards, where the figure reverses it, so that
gradients are summed in microbatch order as in all families here; the length is the same.
"""

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.requirements import require_pipeline
from megatron_pp_ext.schedule.placement import linear


def build(ranks: int, microbatches: int) -> Schedule:
    """GPipe for any ranks >= 2 and microbatches >= 1; makespan 3(m + p - 1) at unit cost."""
    require_pipeline("gpipe", ranks, microbatches)
    orders = tuple(
        tuple(Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("gpipe", linear(ranks), microbatches, orders)
