"""Makes every schedule: the only place where an order and the features' additions are put together.

The order is a family of the catalogue, a file, or what the compiler finds.  Each feature that changes orders
has a pass (``Feature.order``).  A pass gets the request, the costs and all that comes before it as one
function, ``before``, so that it can ask for the same schedule with another number of microbatches or within
other limits.  Passes run in the order of ``FEATURES``, each around those before it.

All of this is about placements with both ends of a V on the first rank.  Where they are on the last one,
the same schedule has its ranks counted from the other end, in one place (``_facing_last``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_pp_ext.compiler.limits import Budget, InfeasibleLimit
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import Feature
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import CSV_PREFIX, FORWARD_ONLY, NO_PIPELINE
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.setting_error import SettingError


@dataclass(frozen=True, slots=True)
class Made:
    """A schedule, and what people should know of it.

    ``note`` has words about what a pass has chosen, and ``about`` some for the line at start-up about what a
    feature adds; they are empty for nothing.  What the compiler found has a
    ``lower_bound`` for its makespan, and an ``origin``: the member of the compiler's portfolio that found it.
    """

    schedule: Schedule
    note: str = ""
    about: str = ""
    lower_bound: float | None = None
    origin: str = ""


Make = Callable[[Request], Made]
"""Makes the schedule of a request by the passes before the one that calls it."""


def make(request: Request, costs: CostModel | None = None, *, is_proved: bool = False) -> Made:
    """Make the schedule of ``request``, for its ``microbatches``, and check it.

    ``costs`` are asked for those of the finest stages, and only where they decide on the order, as they do
    for no family and no file.  With ``is_proved`` the check is left out: a search makes thousands of the
    catalogue's orders, all of which the tests have proved.

    Raises ValueError for sizes that the schedule cannot be built for and for limits that cannot be kept
    (``compiler.limits.InfeasibleLimit``), and what ``costs`` raises.
    """
    cut = (costs or CostModel(_none)).merged_from(request.finest)
    first, *rest = _by_ends(request)
    if not rest:
        return _facing_last(first, cut, is_proved)
    results, reason = [], InfeasibleLimit()
    for part in (first, *rest):
        try:
            results.append(_facing_last(part, cut, is_proved))
        except InfeasibleLimit as error:
            reason = error
    if not results:
        raise reason
    bounds = [part.lower_bound for part in results if part.lower_bound is not None]
    return replace(min(results, key=partial(_makespan, cut)), lower_bound=min(bounds, default=None))


def _by_ends(request: Request) -> list[Request]:
    """Return ``request`` in two where its limits differ by rank and not all placements have the same ends.

    Ranks that count from the other end for a part of the placements alone would have the limits of others.
    """
    limit = request.limit.ranks if isinstance(request.limit, Budget) else request.limit
    ends = {placement.ends_on_last for placement in request.placements}
    if len(ends) == 1 or not isinstance(limit, tuple) or limit == limit[::-1]:
        return [request]
    parts = (
        [placement for placement in request.placements if placement.ends_on_last is last]
        for last in sorted(ends)
    )
    return [replace(request, placements=tuple(part)) for part in parts]


def _makespan(costs: CostModel, result: Made) -> float:
    from megatron_pp_ext.schedule.simulate import simulate

    return simulate(result.schedule, costs.of(result.schedule.placement)).makespan


def _facing_last(request: Request, costs: CostModel, is_proved: bool) -> Made:
    """Make the schedule with both ends on the first rank, then count ranks from the other end if asked to."""
    if not any(placement.ends_on_last for placement in request.placements):
        return _made(request, costs, is_proved)
    try:
        result = _made(request.turned_over, costs, is_proved)
    except InfeasibleLimit as error:
        raise error.turned_over(request.ranks) from error
    if not result.schedule.placement.folds:
        return result
    return replace(result, schedule=result.schedule.turned_over)


def _made(request: Request, costs: CostModel, is_proved: bool) -> Made:
    checked: list[Schedule] = []

    def ordered(request: Request) -> Made:
        result = _ordered(request, costs, is_proved)
        checked.append(result.schedule)
        return result

    before: Make = ordered
    for feature in FEATURES:
        before = _around(feature, costs, before)
    result = before(request)
    for feature in FEATURES:
        result = feature.completed(request, result)
    if not is_proved and not any(result.schedule is schedule for schedule in checked):
        check(result.schedule)
    return result


def _none(placement: Placement) -> Costs:
    raise TypeError("this schedule depends on costs: give make() those of its stages")


def _around(feature: Feature, costs: CostModel, before: Make) -> Make:
    return lambda request: feature.order(request, costs, before)


def _ordered(request: Request, costs: CostModel, is_proved: bool) -> Made:
    """Return the order alone: a family, a file, or the shortest that the compiler finds."""
    if request.is_compiled:
        return _compiled(request, costs)
    if request.from_file is not None:
        return Made(_of_file(request.from_file, request))
    if request.schedule == FORWARD_ONLY:
        return Made(catalog.forward_only(request.placement, request.microbatches))
    if request.schedule == NO_PIPELINE:
        return Made(replace(one_f_one_b.build(1, request.microbatches), name=NO_PIPELINE))
    name = catalog.abilities(request.schedule).order or request.schedule
    sizes = request.ranks, request.microbatches, request.placement.chunks
    return Made(catalog.entry(name).build(*sizes) if is_proved else catalog.build(name, *sizes))


def _compiled(request: Request, costs: CostModel) -> Made:
    from megatron_pp_ext.compiler.cache import in_turn
    from megatron_pp_ext.compiler.compile import compile_schedule

    finest = costs.of(request.finest)
    for feature in FEATURES:
        finest = feature.counted(request, finest)
    budget = request.budget(finest)
    result = compile_schedule(
        request.ranks,
        request.microbatches,
        budget.counted(finest),
        budget.ranks,
        placements=request.placements,
        trials=request.trials,
        lock=in_turn,
    )
    return Made(result.timeline.schedule, lower_bound=result.lower_bound, origin=result.origin)


def _of_file(schedule: Schedule, request: Request) -> Schedule:
    """ValueError unless the schedule of a file is for as many microbatches as the step has."""
    if request.microbatches != schedule.microbatches:
        raise SettingError(
            f"{request.schedule.removeprefix(CSV_PREFIX)} is a schedule for {schedule.microbatches} "
            f"microbatches, but this step has {request.microbatches}; set --global-batch-size accordingly"
        )
    return schedule
