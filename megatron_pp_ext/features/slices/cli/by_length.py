"""What ``mpp schedule --lengths FILE --slice-tokens C`` shows: a step of unlike microbatches in units."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from operator import truediv

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.lengths_options import Lengths
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import console, report
from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.slices.cli.options import Slicing
from megatron_pp_ext.features.slices.options import SMALLEST
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.recorded import Units
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.unit_costs import UnitCosts


def show_schedule(
    request: Request,
    costs: Costs,
    times: ask.Times,
    lengths: Lengths,
    slicing: Slicing,
    units: Units,
    files: ask.Files,
) -> None:
    """Print the step of ``request`` in units of slices and packs, and write the files.

    A family keeps its order, and ``flex`` gets the shortest one that is found for its memory limit.
    ``costs`` are those of the request's finest stages, and ``units`` say what 1 stands for.
    InfeasibleLimit where no placement keeps the limit.
    """
    from megatron_pp_ext.features.slices.plan import Plan, Planner

    microbatches = lengths.microbatches
    assert microbatches is not None
    found, refused, least = list[tuple[Planner, Plan]](), list[InfeasibleLimit](), list[float]()
    limits = None
    if request.is_compiled:
        limits = request.budget(lengths.costs(times, costs).of(microbatches)).ranks

    def of_family(count: int) -> Schedule:
        return make(replace(request, microbatches=count)).schedule

    with waiting("planning units"):
        for placement in request.placements:
            rates = lengths.costs(times, costs.merged(placement.stages))
            planner = Planner(placement, rates, overhead=slicing.overhead)
            try:
                if limits is None:
                    plan = planner.in_family(of_family, microbatches.documents, slicing.most_tokens)
                else:
                    plan = planner.plan(microbatches.documents, slicing.most_tokens, limits)
            except InfeasibleLimit as error:
                refused.append(error)
                shortest = planner.cut(microbatches.documents, slicing.most_tokens or SMALLEST)
                least.append(max(map(truediv, planner.least_limits(shortest), limits or [inf])))
            else:
                found.append((planner, plan))
        if not found:
            raise _infeasible(request.limit, least) or refused[0]
        planner, plan = min(found, key=lambda one: one[1].seconds)
        step = simulate(replace(plan.schedule, name=request.schedule), planner.costs(plan.units))
        report(step, plan.lower_bound, units, files)
    busiest = _work(planner.rates.of(microbatches), planner.placement)
    tokens = sum(plan.units.tokens)
    console.print(
        f"{len(plan.units)} units of at most {max(plan.units.tokens):,} tokens, of {len(microbatches)} "
        f"microbatches with {tokens:,} in all"
    )
    console.print(f"over the work of the busiest rank: {plan.seconds / busiest:.3f}")
    peak = max(step.peak_microbatches) * tokens / len(microbatches)
    console.print(f"peak of the fullest rank: {peak:,.0f} tokens")


def _work(costs: UnitCosts, placement: Placement) -> float:
    """Return the work of the busiest rank, without what units cost on top."""
    per_stage = [
        sum(unit.stages[stage].seconds(kind) for unit in costs.units for kind in (Kind.F, Kind.B))
        for stage in range(placement.stages)
    ]
    return max(
        sum(per_stage[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)
    )


def _infeasible(limit: object, least: Sequence[float]) -> InfeasibleLimit | None:
    """Return the error for a ``limit`` that is one part of 1F1B's peak, else None.

    ``least`` are the smallest limits that are possible, as multiples of it.
    """
    if not isinstance(limit, float) or limit > LARGEST_FRACTION:
        return None
    return InfeasibleLimit(
        f"memory limit {limit:g} of 1f1b's peak is infeasible, a rank must keep the longest document's "
        f"activations of all its stages: raise it to at least {ceil(1e4 * limit * min(least)) / 1e4:g}"
    )
