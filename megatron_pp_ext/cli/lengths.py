"""The options about the lengths of microbatches, and what commands show of their orders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.report import bound_of, console, report, require_size, waiting
from megatron_pp_ext.compiler.make import Made, make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.features.pairs.order import request_in_pairs
from megatron_pp_ext.features.units.microbatches import Microbatches, read_step
from megatron_pp_ext.features.units.rates import EQUAL_AT, LengthCosts
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import loop
from megatron_pp_ext.schedule.recorded import UnitNames
from megatron_pp_ext.schedule.simulate import Timeline

if TYPE_CHECKING:
    from megatron_pp_ext.features.units.plan import Plan


MICROBATCHES = 8
"""The microbatches of a step where no option gives any."""

StepMicrobatches = Annotated[
    int | None,
    typer.Option(
        "-m", "--microbatches", help=f"Microbatches a step.  [default: {MICROBATCHES}, or those of --lengths]"
    ),
]


@dataclass(frozen=True)
class LengthOptions:
    """The lengths of a step's documents; ValueError for options that lack them."""

    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Document lengths in tokens, a list for each microbatch: [[4096, 1200], [8000], ...], or a "
            "line for each.  --f, --i and --w are then those of a microbatch of mean length without "
            "attention.",
            metavar="FILE",
        ),
    ] = None
    equal_at: Annotated[
        float | None,
        typer.Option(
            help="Length of a document whose attention takes as long as all else of its forward.  "
            f"[default: {EQUAL_AT}]",
            metavar="TOKENS",
        ),
    ] = None
    plan_budget: Annotated[
        float | None, typer.Option(help="Milliseconds of a core for the search of an order.  [default: 50]")
    ] = None

    def __post_init__(self) -> None:
        for flag, value in (("--equal-at", self.equal_at), ("--plan-budget", self.plan_budget)):
            if value is None:
                continue
            if self.lengths is None:
                raise ValueError(f"{flag} is given without --lengths, the lengths of documents: give both")
            ask.require_at_least(flag, value, 1)

    @cached_property
    def microbatches(self) -> Microbatches | None:
        """The microbatches of the file, or None without one."""
        return None if self.lengths is None else read_step(self.lengths)

    def count(self, requested: int | None) -> int:
        """Return the microbatches of a step; ValueError where -m contradicts the file."""
        if self.microbatches is None:
            return MICROBATCHES if requested is None else requested
        if requested not in (None, len(self.microbatches)):
            raise ValueError(
                f"-m is {requested}, but {self.lengths} has {len(self.microbatches)} microbatches: leave -m "
                "out"
            )
        return len(self.microbatches)

    @property
    def budget(self) -> float:
        """The seconds of a core for a search."""
        return (self.plan_budget or 50.0) / 1e3

    def costs(self, times: ask.Times, costs: Costs) -> LengthCosts:
        """Return ``costs``, those that ``times`` asks for, by the lengths of documents.

        ValueError for a costs file that does not state for which sizes it is.
        """
        assert self.microbatches is not None
        equal_at = EQUAL_AT if self.equal_at is None else self.equal_at
        if times.output_layer:
            raise ValueError("--output-layer and --lengths do not go together: leave one out")
        if times.costs_file is None:
            mean = sum(self.microbatches.tokens) / len(self.microbatches)
            return LengthCosts.with_attention(costs, mean, equal_at)
        length, documents = costs.sizes.get("seq_length"), costs.sizes.get("micro_batch_size", 1)
        if not length:
            raise ValueError(
                f"{times.costs_file} does not state the length of its costs, which --lengths needs: add "
                '"sizes": {"seq_length": ..., "micro_batch_size": ...}'
            )
        return LengthCosts.measured(costs, length, documents, equal_at)


MakeIt = Callable[[Request, CostModel], Made]

_ABOUT = (
    "over work: the step by the work of the busiest rank\n"
    "peak: the tokens whose activations the fullest rank keeps\n"
    "light-heavy-light: verl and ROLL; heaviest first: Megatron's dynamic context parallelism; largest "
    "first, by tokens: NeMo-RL"
)


def show_schedule(
    request: Request,
    costs: Costs,
    times: ask.Times,
    lengths: LengthOptions,
    files: ask.Files,
    make_it: MakeIt,
    order: str | None,
) -> None:
    """Print a schedule in the requested order, and a table of all orders; write the files."""
    from megatron_pp_ext.features.units.comparison import GIVEN, RULE, SEARCH, over_work, peak_tokens
    from megatron_pp_ext.view import terminal

    orders = {None: SEARCH, "given": GIVEN, "rule": RULE, "search": SEARCH}
    if order not in orders:
        raise ValueError(f"--order is {order}: give one of given, rule and search")
    shown = orders[order]
    rates = lengths.costs(times, costs)
    with waiting("planning the order of microbatches"):
        plans, steps = orders_of(request, rates, lengths, make_it)
        report(steps[shown], bound_of(steps[shown]), units(times), files)
    table = terminal.Numbers("order", ["step", "over\nwork", "bubble", "peak,\ntokens"])
    for name, step in steps.items():
        tokens = f"{peak_tokens(step):,.0f}"
        table.add_row(name, f"{step.makespan:.5g}", f"{over_work(step):.3f}", f"{step.bubble:.1%}", tokens)
    console.print(table)
    console.print(_ABOUT, style="dim")
    console.print(f"{shown}: {' '.join(map(str, plans[shown].order))}")


def show_comparison(ranks: int, times: ask.Times, lengths: LengthOptions, pictures: ask.Pictures) -> None:
    """Print the step of all schedules of one or two chunks a rank with each order, and draw them."""
    from megatron_pp_ext.features.units.comparison import NAMES, over_work, peak_tokens
    from megatron_pp_ext.view import terminal

    count = lengths.count(None)
    rates = lengths.costs(times, times.costs(loop(ranks, 2)))
    requests = with_pairs(compared(ranks, count), times)
    steps = {}
    for name, request in requests.items():
        with waiting(f"planning orders under {name}"):
            _, steps[name] = orders_of(request, rates.merged(request.finest.stages), lengths, make)
    assert lengths.microbatches is not None
    console.print(f"{ranks} ranks, {count} microbatches of {sum(lengths.microbatches.tokens):,} tokens")
    short = [name.replace("-", "-\n").replace(" ", "\n") for name in NAMES]
    for title, form in (
        ("step over the work of the busiest rank", lambda step: f"{over_work(step):.3f}"),
        ("peak of the fullest rank in thousand tokens", lambda step: f"{peak_tokens(step) / 1e3:,.0f}"),
    ):
        table = terminal.Numbers("schedule", short, title)
        for name, by_order in steps.items():
            table.add_row(name, *map(form, by_order.values()))
        console.print(table)
    console.print(_ABOUT, style="dim")
    if pictures.drawn:
        from megatron_pp_ext.view import figure

        bars = {
            name: {order: over_work(step) for order, step in by_order.items()}
            for name, by_order in steps.items()
        }
        for path in pictures.drawn:
            figure.draw(bars, path, "step over the work of the busiest rank", least=1.0)


def compared(ranks: int, microbatches: int) -> dict[str, Request]:
    """Return the requests that are compared, of all schedules with one or two chunks a rank, by name."""
    requests = {
        name: named(name, ranks, microbatches) for name, entry in catalog.ENTRIES.items() if entry.chunks <= 2
    }
    for request in requests.values():
        require_size(request)
    return requests


def with_pairs(requests: dict[str, Request], times: ask.Times) -> dict[str, Request]:
    """Return the requests; with --pair-time also requests with pairs, of the schedules that have them."""
    if times.pair_time is None:
        return requests
    has_pairs = {name: request for name, request in requests.items() if catalog.entry(name).make_paired}
    return requests | {f"{name} +P": request_in_pairs(request) for name, request in has_pairs.items()}


def units(times: ask.Times) -> UnitNames:
    """Return the meaning of 1 where microbatches differ."""
    if times.costs_file is not None:
        return times.units
    return UnitNames(
        f"{times.units.time.removesuffix(' of one microbatch')} of a mean microbatch, without attention",
        times.units.memory,
    )


def orders_of(
    request: Request, rates: LengthCosts, lengths: LengthOptions, make_it: MakeIt
) -> tuple[dict[str, "Plan"], dict[str, Timeline]]:
    """Return the plan and the step with each order; a schedule is compiled for a mean microbatch."""
    from megatron_pp_ext.features.units.comparison import side_by_side, timeline
    from megatron_pp_ext.features.units.plan import Planner, Template

    assert lengths.microbatches is not None
    costs = rates.of(lengths.microbatches)
    alike = Costs(costs.stages, costs.hop, costs.message, costs.head, costs.pair)
    schedule = make_it(request, CostModel.fixed(alike)).schedule
    limits = None if request.limit is None else request.budget(costs).ranks
    planner = Planner(schedule.placement, rates.merged(schedule.placement.stages))
    units = planner.whole(lengths.microbatches.documents)
    plans = side_by_side(planner, Template(schedule), units, lengths.budget, limits)
    in_step = planner.costs(units)
    return plans, {name: timeline(plan, in_step) for name, plan in plans.items()}
