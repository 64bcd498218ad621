"""A schedule made ready to be timed again and again with other costs.

``simulate`` asks for every action what it needs; here that is settled once.  An action waits for its
rank and for at most one message, and the order in which all can be computed does not depend on costs.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, delivers
from megatron_pp_ext.schedule.check import in_order_of_need
from megatron_pp_ext.schedule.costs import Costs

_KINDS = {kind: at for at, kind in enumerate(Kind)}


def makespan(schedule: Schedule, seconds: Callable[[Action], float], hop: float) -> float:
    """From the first start to the last end where every action takes seconds of its own."""
    home = schedule.placement.rank_of
    now = [0.0] * schedule.ranks
    ends: dict[Action, float] = {}
    for rank, action, inputs in in_order_of_need(schedule):
        arrivals = (ends[need] + (hop if home(need.stage) != rank else 0.0) for need in inputs)
        now[rank] = max((now[rank], *arrivals)) + seconds(action)
        ends[delivers(action)] = now[rank]
    return max(now)


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank starts its first action and ends its last one, and how long it works in between."""

    start: float
    end: float
    busy: float


class Replay:
    """The actions of ``schedule`` in an order in which each follows what it needs."""

    def __init__(self, schedule: Schedule) -> None:
        placement = schedule.placement
        self.schedule = schedule
        home = [placement.rank_of(stage) for stage in range(placement.stages)]
        at: dict[Action, int] = {}
        # Rank, what it does in terms of ``seconds`` below, and which step sends its input, -1 for none.
        self._steps: list[tuple[int, int, int]] = []
        self._first: dict[int, int] = {}
        for rank, action, inputs in in_order_of_need(schedule):
            sender = next((at[need] for need in inputs if home[need.stage] != rank), -1)
            at[delivers(action)] = len(self._steps)
            self._first.setdefault(rank, sender)
            self._steps.append((rank, len(_KINDS) * action.stage + _KINDS[action.kind], sender))
        self._work = [
            Counter(work for home, work, _ in self._steps if home == rank) for rank in range(placement.ranks)
        ]

    def spans(self, costs: Costs) -> tuple[Span, ...]:
        """Every rank's span; starts and ends are those of ``simulate(schedule, costs)`` to the last digit."""
        seconds = [stage.seconds(kind) for stage in costs.stages for kind in Kind]
        hop = costs.hop
        now = [0.0] * len(self._work)
        ends: list[float] = []
        for rank, work, sender in self._steps:
            start = now[rank]
            if sender >= 0:
                arrival = ends[sender] + hop
                if arrival > start:
                    start = arrival
            now[rank] = start + seconds[work]
            ends.append(now[rank])
        return tuple(
            Span(
                ends[self._first[rank]] + hop if self._first[rank] >= 0 else 0.0,
                now[rank],
                sum(count * seconds[work] for work, count in counts.items()),
            )
            for rank, counts in enumerate(self._work)
        )
