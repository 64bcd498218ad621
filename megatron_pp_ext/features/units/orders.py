"""Orders of microbatches of unlike cost, among them those of other frameworks.

An order is a list of microbatches: the one in place k is done as microbatch k of the schedule.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from megatron_pp_ext.schedule.placement import Placement, Shape

Order = list[int]

How = Literal["given", "rule", "search"]
"""``given`` leaves the microbatches in the order of the data, ``rule`` orders them by the rule of the
schedule's family, and ``search`` goes on from the best order that is known."""


def heaviest_first(costs: Sequence[float]) -> Order:
    """Return the microbatches by falling cost; equal ones stay in their order."""
    return sorted(range(len(costs)), key=lambda number: -costs[number])


def light_heavy_light(costs: Sequence[float]) -> Order:
    """Return the order whose costs rise up to the middle and fall from there on (verl, ROLL).

    While a pipeline fills and drains, ranks wait for one microbatch after the other; there it has the light
    ones.
    """
    falling = heaviest_first(costs)
    return falling[::2][::-1] + falling[1::2]


def groups_of_like_cost(costs: Sequence[float], size: int) -> Order:
    """Return groups of ``size`` microbatches of like cost, light-heavy-light, and so within each group.

    With several chunks a rank, a group goes through the pipeline once for each chunk, and each microbatch of
    the group waits for the heaviest of it.
    """
    falling = heaviest_first(costs)
    groups = [falling[first : first + size] for first in range(0, len(falling), size)]
    short = [groups.pop()] if len(groups[-1]) < size else []
    # A short group is one of the light ones, and the schedule has it at the end.
    ordered = groups[::2][::-1] + groups[1::2] + short
    return [
        group[place] for group in ordered for place in light_heavy_light([costs[number] for number in group])
    ]


def by_rule(costs: Sequence[float], placement: Placement) -> list[Order]:
    """Return the orders by the rule of the schedules with this ``placement``, of which the shortest is taken.

    In a loop groups of like cost are nearly always the shortest, but not for every step.
    """
    if placement.shape is Shape.LOOP:
        return [groups_of_like_cost(costs, placement.ranks), light_heavy_light(costs)]
    return [light_heavy_light(costs)]


ELSEWHERE: dict[str, Callable[[Sequence[float], Sequence[int]], Order]] = {
    "light-heavy-light": lambda costs, tokens: light_heavy_light(costs),
    "heaviest first": lambda costs, tokens: heaviest_first(costs),
    "largest first": lambda costs, tokens: heaviest_first(tokens),
}
"""Orders of other frameworks, by (cost, tokens) of the microbatches.

light-heavy-light is verl's and ROLL's, heaviest first that of Megatron's dynamic context parallelism, and
largest first, by tokens, NeMo-RL's for the sake of the memory allocator.
"""
