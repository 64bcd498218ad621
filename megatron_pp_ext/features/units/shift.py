"""A family's order for slices: the shape of Seq1F1B (arXiv 2406.03488), under any schedule.

A schedule for microbatches does the backward of microbatch j no earlier than its forward.  Of a sequence in k
slices the last one's backward comes first, k - 1 forwards later than its first slice's could.  So the family
makes an order for k - 1 microbatches more than there are units.  Its first k - 1 backwards are left out, as
are its last k - 1 forwards, and backward number j + k - 1 is the jth in the units' own order.  An action then
waits only for actions that it also waited for before, so ranks cannot come to wait for each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together

_FORWARDS = Kind.F, Kind.S


def more(units: Units) -> int:
    """Return how many forwards the first backward of a unit waits for, besides that of the first unit."""
    return max(map(len, units.chains)) - 1


def shifted(schedule: Schedule, units: Units) -> Schedule:
    """Return ``schedule``, which is for ``len(units) + more(units)`` microbatches or more, for ``units``.

    ValueError for schedules with copies to the host, which are planned for microbatches.
    """
    if schedule.copies:
        raise ValueError("activations of slices are not copied to the host: leave one of the two out")
    count, delay, backwards = len(units), more(units), units.backwards
    paired: set[Action] = set()

    def kept(order: Iterable[Action]) -> Iterator[Action]:
        for actions in together(tuple(order), schedule.paired):
            found = list[Action]()
            for action in actions:
                if action.kind in _FORWARDS:
                    if action.microbatch < count:
                        found.append(action)
                elif delay <= action.microbatch < count + delay:
                    found.append(action._replace(microbatch=backwards[action.microbatch - delay]))
            if len(found) > 1:
                paired.add(found[0])
            yield from found

    orders = tuple(tuple(kept(order)) for order in schedule.orders)
    return replace(schedule, microbatches=count, orders=orders, paired=frozenset(paired), units=units.names)


def require_chain_order(schedule: Schedule, units: Units) -> None:
    """Raise ValueError unless every stage takes slices forward in their order, and back in reverse."""
    if schedule.microbatches != len(units):
        raise ValueError(
            f"the schedule is for {schedule.microbatches} units, but there are {len(units)}: "
            "make it for as many"
        )
    latest: dict[tuple[int, bool, int], int] = {}
    for action in schedule:
        stage, kind, unit = action
        if kind not in (Kind.F, Kind.I, Kind.B):
            continue
        is_forward, chain = kind is Kind.F, units.chain_of[unit]
        before = unit - 1 if is_forward else unit + 1
        if before in chain and latest.get((stage, is_forward, chain[0])) != before:
            raise ValueError(
                f"{action} comes before that of slice {units.units[before].slice} of its sequence: slices go "
                "forward in their order and back in reverse"
            )
        latest[stage, is_forward, chain[0]] = unit
