"""Steps compared by simulation: orders of other frameworks next to ours, and packings of documents."""

from collections.abc import Sequence
from functools import lru_cache

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units import orders
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.plan import BUDGET, Plan, Planner, Template, in_order
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.simulate import Timeline, simulate

GIVEN, RULE, SEARCH = "given", "by rule", "searched"
Share = Sequence[Sequence[int]]
"""The numbers of the documents in each microbatch of a replica."""

NAMES = (GIVEN, *orders.ELSEWHERE, RULE, SEARCH)
"""The names of the orders, ours last."""


def side_by_side(
    planner: Planner,
    template: Template,
    units: Units,
    budget: float = BUDGET,
    limits: Sequence[float] | None = None,
) -> dict[str, Plan]:
    """Return the plan of whole microbatches with each order, by its name; ``limits`` bind those planned here.

    Raises what ``Planner.plan`` raises.
    """

    def plan(how: How) -> Plan:
        return planner.plan(units, how, template=template, limits=limits, budget=budget)

    table = planner.table(units)
    work: list[float] = table.work.tolist()
    plans = {GIVEN: plan("given")}
    for name, order in orders.ELSEWHERE.items():
        plans[name] = in_order(template, units, table, order(work, units.tokens))
    plans[RULE], plans[SEARCH] = plan("rule"), plan("search")
    return plans


def timeline(plan: Plan, costs: UnitCosts) -> Timeline:
    """Return the simulated step of ``plan``, whose microbatches have ``costs`` in the order of the data."""
    return simulate(plan.schedule, costs.ordered(plan.order))


def peak_tokens(step: Timeline) -> float:
    """Return the tokens whose activations the fullest rank keeps at most.

    Activations of part of a rank's stages count as that part of their tokens.
    """
    costs = step.costs
    assert isinstance(costs, UnitCosts)
    return max(step.peak_microbatches) * sum(costs.tokens) / len(costs.tokens)


def over_work(step: Timeline) -> float:
    """Return the step as a multiple of the work of the busiest rank, which no order falls below."""
    placement, costs = step.schedule.placement, step.costs
    busy = [0.0] * placement.ranks
    for events, rank in zip(step.events, range(placement.ranks), strict=True):
        busy[rank] = sum(costs.seconds(action) for action, _, _ in events)
    return step.makespan / max(busy)


_HEAVIEST = 3
"""How many of the replicas with the most work are timed where packings are compared roughly."""


class PackedSteps:
    """Times packings of documents with these ``lengths``, in any unit.

    They run under ``schedule`` with so many pipeline ``ranks`` and ``chunks`` a rank, their microbatches
    ordered by its rule.  A document of ``equal_at`` tokens takes as long for attention as for all else, and a
    microbatch costs ``overhead`` tokens on top of its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        schedule: str,
        ranks: int,
        chunks: int | None,
        equal_at: float,
        overhead: float,
    ) -> None:
        self._lengths, self._overhead = lengths, overhead
        self._pipeline, self._equal_at = (schedule, ranks, chunks), equal_at

    def seconds(self, shares: Sequence[Share]) -> float:
        """Return how long the slowest replica takes; ValueError where the schedule cannot be."""
        return max(map(self._of_replica, shares))

    def roughly(self, shares: Sequence[Share]) -> float:
        """Return the same of the replicas with the most work, in less time."""
        return self.seconds(sorted(shares, key=self._work)[-_HEAVIEST:])

    def _work(self, share: Share) -> float:
        lengths = [self._lengths[place] for part in share for place in part]
        return sum(length + length * length / self._equal_at for length in lengths)

    def _of_replica(self, share: Share) -> float:
        schedule, ranks, chunks = self._pipeline
        template = _template(schedule, ranks, len(share), chunks)
        placement = template.schedule.placement
        rates = LengthCosts.with_attention(Costs.per_rank(ranks, placement.chunks), 1, self._equal_at)
        planner = Planner(placement, rates, overhead=self._overhead)
        units = planner.whole([self._lengths[place] for place in part] for part in share)
        return planner.plan(units, "rule", template=template).seconds


@lru_cache(maxsize=64)
def _template(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> Template:
    """Return the template of a schedule, which many steps need."""
    return Template(make(named(schedule, ranks, microbatches, chunks)).schedule)
