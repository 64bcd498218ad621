"""From a description to an estimate in one call."""

from argparse import Namespace
from collections.abc import Callable, Sequence

from megatron_pp_ext.planner.step.estimate import MARGIN, Estimate, estimate
from megatron_pp_ext.planner.step.programs import compiled, program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.planner.system import System
from megatron_pp_ext.request.plan import Plan
from megatron_pp_ext.schedule.placement import Placement

Cut = Callable[[int], Sequence[int]]
"""The layers of each of so many stages."""


def estimate_plan(
    args: Namespace, system: System, plan: Plan, cut: Cut | None = None, margin: float = MARGIN
) -> Estimate:
    """The estimate of ``plan``, ``args``'s own; ``cut`` where the layers are not spread evenly.

    ``args.vocab_size`` is the size of the vocabulary.  ValueError for layers that do not fill the stages
    and for a limit of ``flex`` that cannot be kept.
    """

    def work_on(placement: Placement) -> Workload:
        layers = cut(placement.stages) if cut else None
        return Workload(args, system, placement, plan.data, layers)

    work, name, ranks = work_on(plan.placement), plan.schedule, plan.placement.ranks
    if name == "flex":
        if not args.pipeline_memory_limit or args.pipeline_memory_limit <= 0:
            raise ValueError(
                "--pipeline-schedule flex needs --pipeline-memory-limit above 0: give a fraction of 1F1B's "
                "peak, such as 0.5, or bytes"
            )
        order, placement = compiled(ranks, plan.microbatches, work.costs, args.pipeline_memory_limit)
        work = work_on(placement)
    else:
        order = program(name, ranks, plan.microbatches, plan.placement.chunks)
    return estimate(work, order, name, plan.microbatches, margin)
