"""What ``mpp schedule`` and ``mpp compare`` ask and show of slices, and of units of unlike length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from operator import truediv
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_pp_ext.cli import lengths as by_length
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.lengths import LengthOptions
from megatron_pp_ext.cli.options import require_at_least
from megatron_pp_ext.cli.report import console, report, waiting
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import SMALLEST, Slices
from megatron_pp_ext.features.units.rates import OVERHEAD, LengthCosts
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.placement import Placement, loop
from megatron_pp_ext.schedule.recorded import UnitNames
from megatron_pp_ext.schedule.simulate import Timeline, simulate

if TYPE_CHECKING:
    from megatron_pp_ext.features.units.plan import Plan


LEGEND = "/{}: every sequence goes through the pipeline in {} slices"


@dataclass(frozen=True, slots=True)
class Slicing:
    """How sequences are cut into slices; ValueError for options that contradict each other."""

    slices: Annotated[
        int | None,
        typer.Option(
            help="Cut every microbatch's sequence into so many equal slices, each of which takes its part of "
            "a microbatch's time and memory.  Attention to the slices before is not counted apart.",
            metavar="K",
        ),
    ] = None
    slice_tokens: Annotated[
        str | None,
        typer.Option(
            help="With --lengths, cut documents longer than C tokens into slices, and let shorter ones go "
            "together up to C; auto chooses C by the simulated step.",
            metavar="C",
        ),
    ] = None
    unit_overhead: Annotated[
        float | None,
        typer.Option(
            help="With --slice-tokens, the tokens that each slice or pack costs on top of its own, for "
            f"kernels that are slower where they are small.  [default: {OVERHEAD:.0f}]",
            metavar="TOKENS",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"--slices is {self.slices}, but must be 1 or more: raise it")
        if self.slices is not None and self.slice_tokens is not None:
            raise ValueError("--slices and --slice-tokens contradict each other: leave one out")
        if self.slice_tokens not in (None, AUTO) and not (
            self.slice_tokens.isdecimal() and int(self.slice_tokens) > 0
        ):
            raise ValueError(
                f"--slice-tokens is {self.slice_tokens}: give a whole number from 1 on, or {AUTO}"
            )
        if self.unit_overhead is not None:
            if self.slice_tokens is None:
                raise ValueError("--unit-overhead is given without --slice-tokens: give both")
            require_at_least("--unit-overhead", self.unit_overhead, 0)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a unit; None where they are to be chosen."""
        return None if self.slice_tokens in (None, AUTO) else int(self.slice_tokens)

    @property
    def overhead(self) -> float:
        """The tokens that a unit costs on top of its own."""
        return OVERHEAD if self.unit_overhead is None else self.unit_overhead

    def require_lengths(self, are_given: bool) -> None:
        """Raise ValueError for options that lack ``--lengths``, or contradict it."""
        if self.slice_tokens is not None and not are_given:
            raise ValueError("--slice-tokens is given without --lengths, the lengths of documents: give both")
        if self.slices is not None and are_given:
            raise ValueError("--slices is for equal microbatches: give --slice-tokens with --lengths")

    @property
    def is_given(self) -> bool:
        """Whether any sequence is cut."""
        return (self.slices or 1) > 1

    def added_to(self, request: Request) -> Request:
        """Return ``request`` with the slices, whose attention is not counted apart."""
        if not self.is_given:
            return request
        return request.with_option(Slices(1, self.slices or 1, overhead=0.0, equal_at=inf))

    def costs(self, costs: Costs, schedule: Schedule) -> Costs:
        """Return the costs of the units of ``schedule``, where ``costs`` are those of a microbatch."""
        if not schedule.units:
            return costs
        from megatron_pp_ext.features.units.units import named_units

        return LengthCosts.measured(costs, self.slices or 1, 1, inf).of(named_units(schedule.units))

    def require_size(self, request: Request) -> None:
        """Raise ValueError, before anything is built, for more actions than are simulated."""
        replace(request, microbatches=request.microbatches * (self.slices or 1)).require_few_actions()


_LIMITS = 0.25, 1 / 3, 0.5, 0.75, 1.0
"""The parts of 1F1B's peak for which ``flex`` is compared."""

_ABOUT = (
    "over work: the step by the work of the busiest rank; whole microbatches are in the order that a search "
    "finds\n"
    "peak: the tokens whose activations the fullest rank keeps\n"
    "flex 0.50: planned for half of 1f1b's activations, where they can be kept"
)


@dataclass(frozen=True, slots=True)
class _CutStep:
    """A step of ``microbatches`` in units, and the ``work`` of the busiest rank in it."""

    plan: "Plan"
    step: Timeline
    microbatches: Microbatches
    work: float

    @property
    def tokens(self) -> int:
        return sum(self.plan.units.tokens)

    @property
    def over_work(self) -> float:
        """The step as a multiple of the work of the busiest rank, without what units cost on top."""
        return self.plan.seconds / self.work

    @property
    def peak(self) -> float:
        """The tokens whose activations the fullest rank keeps at most."""
        return max(self.step.peak_microbatches) * self.tokens / len(self.microbatches)


def show_schedule(
    request: Request,
    costs: Costs,
    times: ask.Times,
    lengths: LengthOptions,
    slicing: Slicing,
    units: UnitNames,
    files: ask.Files,
) -> None:
    """Print the step of ``request`` in units of slices and packs, and write the files.

    A family gets the shorter of its own order and list scheduling within what that keeps, and ``flex`` the
    shortest one that is found for its memory limit.
    ``costs`` are those of the request's finest stages, and ``units`` the meaning of 1.
    InfeasibleLimit where no placement keeps the limit.
    """
    with waiting("planning units"):
        planned = _planned(request, costs, times, lengths, slicing)
        report(planned.step, planned.plan.lower_bound, units, files)
    cut = planned.plan.units
    console.print(
        f"{len(cut)} units of at most {max(cut.tokens):,} tokens, of {request.microbatches} microbatches "
        f"with {planned.tokens:,} in all"
    )
    console.print(f"over the work of the busiest rank: {planned.over_work:.3f}")
    console.print(f"peak of the fullest rank: {planned.peak:,.0f} tokens")


def show_comparison(
    ranks: int, times: ask.Times, lengths: LengthOptions, slicing: Slicing, pictures: ask.Pictures
) -> None:
    """Print the step of all schedules of one or two chunks a rank whole and in units, and draw them.

    The rows of ``flex`` are of parts of 1F1B's peak, as far as they can be kept.
    """
    from megatron_pp_ext.features.units.comparison import SEARCH, over_work, peak_tokens
    from megatron_pp_ext.view import figure, terminal

    halves, count = times.costs(loop(ranks, 2)), lengths.count(None)
    headings = [
        "over\nwork,\nwhole",
        "over\nwork,\nin units",
        "peak,\nwhole",
        "peak,\nin units",
        "units",
        "largest",
    ]
    table = terminal.Numbers("schedule", headings)
    bars = dict[str, dict[str, float]]()
    requests = by_length.with_pairs(by_length.compared(ranks, count), times)
    limited = {f"{FLEX} {limit:.2f}": named(FLEX, ranks, count, limit=limit) for limit in _LIMITS}
    for name, request in (requests | limited).items():
        costs = halves.merged(request.finest.stages)
        with waiting(f"planning units under {name}"):
            try:
                planned = _planned(request, costs, times, lengths, slicing)
            except InfeasibleLimit:
                continue
            work, peak, bars[name] = "", "", {"in units": planned.over_work}
            if name in requests:
                whole = by_length.orders_of(request, lengths.costs(times, costs), lengths, make)[1][SEARCH]
                work, peak = f"{over_work(whole):.3f}", f"{peak_tokens(whole):,.0f}"
                bars[name] = {"whole, searched": over_work(whole), **bars[name]}
        units = planned.plan.units
        sizes = f"{len(units)}", f"{max(units.tokens):,}"
        table.add_row(name, work, f"{planned.over_work:.3f}", peak, f"{planned.peak:,.0f}", *sizes)
    console.print(f"{ranks} ranks, {count} microbatches of {planned.tokens:,} tokens")
    console.print(table)
    console.print(_ABOUT, style="dim")
    for path in pictures.drawn:
        figure.draw(bars, path, "step over the work of the busiest rank", least=1.0)


def _planned(
    request: Request, costs: Costs, times: ask.Times, lengths: LengthOptions, slicing: Slicing
) -> _CutStep:
    """Return the step of ``request`` in units; see ``show_schedule``."""
    from megatron_pp_ext.features.units.plan import Plan, Planner
    from megatron_pp_ext.features.units.sliced_orders import SlicePlanner

    microbatches = lengths.microbatches
    assert microbatches is not None
    plans, refused, least = list[tuple[Planner, Plan]](), list[InfeasibleLimit](), list[float]()
    documents = microbatches.documents
    for placement in request.placements:
        rates = lengths.costs(times, costs.merged(placement.stages))
        planner = Planner(
            placement, rates, splits_backward=request.may_split_backward, overhead=slicing.overhead
        )
        steps, whole = (
            SlicePlanner(replace(request, placements=(placement,)), planner),
            planner.whole(documents),
        )
        try:
            tokens = slicing.most_tokens or steps.chosen(documents, whole)
            plan = steps.plan(planner.cut(documents, tokens), whole=whole)
        except InfeasibleLimit as error:
            refused.append(error)
            shortest = planner.cut(documents, slicing.most_tokens or SMALLEST)
            limits = request.budget(planner.rates.of(microbatches)).ranks
            least.append(max(map(truediv, planner.least_limits(shortest), limits)))
        else:
            plans.append((planner, plan))
    if not plans:
        raise _infeasible(request.limit, least) or refused[0]
    planner, plan = min(plans, key=lambda entry: entry[1].seconds)
    timed = planner.timed(plan).schedule
    step = simulate(replace(timed, name=request.schedule), planner.costs(plan.units))
    work = _work(planner.rates.of(microbatches), planner.placement)
    return _CutStep(plan, step, microbatches, work)


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
