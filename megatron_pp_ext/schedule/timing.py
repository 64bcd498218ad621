"""The one loop that times a schedule with costs; the compiler's search has its own, in whole numbers.

A rank works strictly in its order.  An action starts as soon as the action before it on its rank has ended
and the message that it needs from another rank, at most one, has arrived.  Messages never queue for a wire.
What an action waits for does not depend on costs, so ``ScheduleTimer`` finds it once for a schedule, which
can then be timed with as many costs as there are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, delivers
from megatron_pp_ext.schedule.check import in_order_of_need
from megatron_pp_ext.schedule.costs import Costs

_KINDS = {kind: at for at, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Span:
    """The times at which a rank starts its first action and ends its last one, and its working time."""

    start: float
    end: float
    busy: float


class ScheduleTimer:
    """A schedule whose actions are sorted such that each one follows those that it waits for.

    ``steps[r]`` are the numbers of rank r's actions in that order, counted from 1.  Raises InvalidSchedule
    (see ``check``) when the ranks wait for each other.
    """

    def __init__(self, schedule: Schedule) -> None:
        placement = schedule.placement
        home = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.schedule = schedule
        self.steps: list[list[int]] = [[] for _ in schedule.orders]
        self._actions: list[Action] = []
        # By step: the step before it on its rank, the one on another rank that sends its input, and the place
        # of its duration in ``_durations``.  0 is no step.
        self._needs: list[tuple[int, int, int]] = []
        step_of: dict[Action, int] = {}
        for rank, action, inputs in in_order_of_need(schedule):
            own = self.steps[rank]
            sender = next((step_of[need] for need in inputs if home[need.stage] != rank), 0)
            work = len(_KINDS) * action.stage + _KINDS[action.kind]
            self._needs.append((own[-1] if own else 0, sender, work))
            self._actions.append(action)
            own.append(len(self._actions))
            step_of[delivers(action)] = len(self._actions)
        self._work = [Counter(self._needs[step - 1][2] for step in own) for own in self.steps]

    def times(self, costs: Costs) -> tuple[list[float], list[float]]:
        """The starts and the ends of all steps by their numbers; at 0, which is no step, both are 0.0."""
        return _times(self._needs, _durations(costs), costs.hop)

    def makespan(self, seconds: Callable[[Action], float], hop: float) -> float:
        """The time from 0 to the last end where every action takes ``seconds`` of its own."""
        needs = ((before, sender, at) for at, (before, sender, _) in enumerate(self._needs))
        return max(_times(needs, [seconds(action) for action in self._actions], hop)[1])

    def spans(self, costs: Costs) -> tuple[Span, ...]:
        """Every rank's span; starts and ends are those of ``simulate(schedule, costs)`` to the last digit."""
        seconds = _durations(costs)
        starts, ends = _times(self._needs, seconds, costs.hop)
        return tuple(
            Span(starts[own[0]], ends[own[-1]], sum(count * seconds[work] for work, count in counts.items()))
            for own, counts in zip(self.steps, self._work, strict=True)
        )


def _durations(costs: Costs) -> list[float]:
    """The seconds of every kind of action of every stage."""
    return [stage.seconds(kind) for stage in costs.stages for kind in Kind]


def _times(
    needs: Iterable[tuple[int, int, int]], durations: Sequence[float], hop: float
) -> tuple[list[float], list[float]]:
    """The starts and ends of all steps, after a 0.0 in place of step 0."""
    starts, ends = [0.0], [0.0]
    for before, sender, work in needs:
        start = ends[before]
        if sender:
            arrival = ends[sender] + hop
            if arrival > start:
                start = arrival
        starts.append(start)
        ends.append(start + durations[work])
    return starts, ends
