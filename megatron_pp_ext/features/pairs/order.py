"""Orders in pairs: those of families, and pairs for an order that has none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.make import Made, Make
from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import FLEX, FORWARD_ONLY, NO_PIPELINE
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.program import Program
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.schedule.walk import Walk

_UNPROVED = (
    "a pair takes {:.2f} of its forward and backward; all published runs in pairs with a pipeline that were "
    "compared are interleaved"
)
"""The note of an estimate in pairs; it takes ``Costs.pair``."""


@dataclass(frozen=True, slots=True)
class Pairs(Option):
    """Forwards and backwards run in pairs where the order has a place for them.

    A B in a pair leaves its weight gradients to where Megatron's plans of layers compute them.
    """

    splits_backward = True

    def caution(self, ranks: int, costs: Costs) -> str:
        return _UNPROVED.format(costs.pair) if ranks > 1 else ""


def request_in_pairs(request: Request, is_paired: bool = True) -> Request:
    """Return ``request`` with pairs, or as it is unless ``is_paired``."""
    return request.with_option(Pairs()) if is_paired else request


_ACTIONS = 200_000
"""The most actions that are timed to find pairs to dissolve; each attempt times the whole schedule."""


def compiled(shortest: Timeline, origin: str, cuts: Sequence[Cut]) -> Iterator[tuple[Timeline, str]]:
    """Yield ``shortest`` in pairs, and the families that have pairs; see ``Feature.compiled``.

    Nothing where a pair takes as long as its two actions.
    """
    if shortest.costs.pair >= 1:
        return
    yield in_pairs(shortest.schedule, shortest.costs), f"{origin}, in pairs"
    for name, entry in catalog.ENTRIES.items():
        for cut in cuts:
            placement = cut.placement
            if entry.make_paired is None or entry.shape is not placement.shape:
                continue
            if not entry.accepts(placement.chunks):
                continue
            family = entry.build(placement.ranks, cut.microbatches, placement.chunks, paired=True)
            timeline = simulate(replace(family, name=FLEX), cut.costs)
            yield timeline, f"{name} in pairs, {placement.shape} placement"


def paired(request: Request, before: Make) -> Made:
    """Return a family's order with pairs; a pass of ``compiler.make``.

    ValueError for a family that has none.  A compiled order has its pairs already, a file its own.
    """
    if request.is_compiled or request.from_file is not None or request.schedule == FORWARD_ONLY:
        return before(request)
    if request.schedule == NO_PIPELINE:
        # Megatron pairs a forward with the backward of the microbatch before also without a pipeline
        # (``combined_1f1b_schedule_for_no_pipelining`` in megatron.core.pipeline_parallel.combined_1f1b).
        return Made(replace(one_f_one_b.build_paired(1, request.microbatches), name=NO_PIPELINE))
    entry = catalog.entry(catalog.abilities(request.schedule).order or request.schedule)
    catalog.require_pairs(entry)
    return Made(entry.build(request.ranks, request.microbatches, request.placement.chunks, paired=True))


def counted(request: Request, costs: Costs) -> Costs:
    """Return ``costs`` in which no pair saves anything unless the request has pairs."""
    return costs if request.option(Pairs) else replace(costs, pair=1.0)


def in_pairs(schedule: Schedule, costs: Costs) -> Timeline:
    """Return ``schedule``, which has no pairs, with all pairs that shorten it; simulated with ``costs``.

    A pair is shorter than its two actions (``Costs.pair``), but it waits for the inputs of both, and what
    waits for either output waits for its end.  So more pairs are not always better.  Every forward with a
    backward after it begins as a pair; pairs in which ranks would wait for each other are dissolved, and then
    those without which the step is shorter.  The order of actions, and with it the memory, stays as it is.
    """
    best = simulate(_with(schedule, _without_circles(schedule, _adjacent(schedule))), costs)
    attempts = _ACTIONS // max(1, sum(map(len, schedule.orders)))
    # A late pair has less after it that its dissolution could shorten.
    for pair in sorted(best.schedule.paired, key=lambda action: (action.microbatch, action.stage))[:attempts]:
        fewer = simulate(_with(schedule, best.schedule.paired - {pair}), costs)
        if fewer.makespan < best.makespan:
            best = fewer
    return best


def _with(schedule: Schedule, paired: frozenset[Action]) -> Schedule:
    return replace(schedule, paired=paired)


def _adjacent(schedule: Schedule) -> frozenset[Action]:
    """Return the forwards that have an I or a B of another microbatch right after them."""
    return frozenset(
        action
        for order in schedule.orders
        for action, following in pairwise(order)
        if action.kind is Kind.F
        and following.kind in (Kind.I, Kind.B)
        and action.microbatch != following.microbatch
    )


def _without_circles(schedule: Schedule, paired: frozenset[Action]) -> frozenset[Action]:
    """Return ``paired`` without the pairs that make ranks wait for each other in a circle.

    Where no rank can continue, all pairs dissolve that ranks stand at: without pairs the order has no circle.
    """
    while True:
        walk = Walk(Program.of(replace(schedule, paired=paired)))
        if walk.is_complete:
            return paired
        ends = walk.program.columns.bounds[1:]
        paired -= {walk.program.actions[at] for at, end in zip(walk.at, ends, strict=True) if at < end}
