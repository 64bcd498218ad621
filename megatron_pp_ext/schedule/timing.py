"""The one loop that times a schedule with costs; searches, of orders and of configurations, compile theirs.

A rank works strictly in its order.  An action starts as soon as the action before it on its rank has ended
and what it needs from other ranks has arrived: at most one message, or what the ranks exchange about a shared
vocabulary.  A pair starts as soon as this holds for both of its actions.  Messages never queue for a wire.
What an action waits for does not depend on costs, so ``ScheduleTimer`` finds it once for a schedule, which
can then be timed with as many costs as there are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import batched

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule, delivers
from megatron_pp_ext.schedule.check import in_order_of_need
from megatron_pp_ext.schedule.costs import Costs

_KINDS = {kind: at for at, kind in enumerate(OF_STAGES)}
_SHARED = {Kind.S: 0, Kind.T: 1}
_NO_WORK = 2
_PAIRS = 3
"""Places behind those of the stages in ``ScheduleTimer._durations``."""


@dataclass(frozen=True, slots=True)
class Span:
    """The times at which a rank starts its first action and ends its last one, and its working time."""

    start: float
    end: float
    busy: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The actions that follow each other without a wait up to the last end, which is ``makespan``.

    ``work[s]`` are the numbers of F, I and W of stage s among them; a whole backward is an I and a W, and an
    action in a pair counts as ``Costs.pair``.  With any other costs of the stages the same actions still wait
    for each other, so that no makespan is below their sum.
    """

    makespan: float
    work: tuple[tuple[float, float, float], ...]


class ScheduleTimer:
    """A schedule whose actions are sorted such that each one follows those that it waits for.

    ``steps[r]`` are the numbers of rank r's actions in that order, counted from 1; the two of a pair have
    the same.  Raises InvalidSchedule
    (see ``check``) when the ranks wait for each other.
    """

    def __init__(self, schedule: Schedule) -> None:
        placement = schedule.placement
        home = [placement.rank_of(stage) for stage in range(placement.stages)]
        self.schedule = schedule
        self.steps: list[list[int]] = [[] for _ in schedule.orders]
        self._actions: list[tuple[Action, ...]] = []
        # By step: the step before it on its rank, the one on another rank that sends its input, the wire, and
        # the place of its duration in ``_durations``.  0 is no step.  An action with inputs of several ranks
        # follows steps without work, each of which waits for one of them.  The two of a pair are one step.
        self._needs: list[tuple[int, int, int, int]] = []
        self._pairs: dict[tuple[int, int], int] = {}
        self._stages = placement.stages
        no_work = len(_KINDS) * placement.stages + _NO_WORK
        step_of: dict[Action, int] = {}
        forward: Action | None = None
        waited: list[tuple[int, int]] = []
        for rank, action, inputs in in_order_of_need(schedule):
            own = self.steps[rank]
            before = own[-1] if own else 0
            wire = _wire(action, schedule)
            waited += [(step_of[need], wire) for need in inputs if home[need.stage] != rank]
            if action in schedule.paired:
                forward = action
                continue
            *others, (sender, wire) = waited or [(0, 0)]
            for other in others:
                before = self._add((), before, *other, no_work)
            actions = (action,) if forward is None else (forward, action)
            step = self._add(actions, before, sender, wire, self._place(actions))
            for one in actions:
                own.append(step)
                step_of[delivers(one)] = step
            forward, waited = None, []
        self._work = [Counter(self._needs[step - 1][3] for step in dict.fromkeys(own)) for own in self.steps]

    def _add(self, actions: tuple[Action, ...], *needs: int) -> int:
        self._needs.append(needs)  # type: ignore[arg-type]
        self._actions.append(actions)
        return len(self._actions)

    def _place(self, actions: tuple[Action, ...]) -> int:
        """The place of the duration of ``actions``, an action or a pair, in ``_durations``."""
        behind = len(_KINDS) * self._stages
        first, *others = [
            behind + _SHARED[action.kind]
            if action.kind in _SHARED
            else len(_KINDS) * action.stage + _KINDS[action.kind]
            for action in actions
        ]
        for second in others:
            return self._pairs.setdefault((first, second), behind + _PAIRS + len(self._pairs))
        return first

    def _durations(self, costs: Costs) -> list[float]:
        """The seconds of each kind of action of each stage, of those on a shared vocabulary, and of pairs."""
        shared = costs.vocabulary
        own = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        alone = [*(stage.seconds(kind) for stage in costs.stages for kind in OF_STAGES), *own, 0.0]
        return alone + [costs.of_pair(alone[first], alone[second]) for first, second in self._pairs]

    def times(self, costs: Costs) -> tuple[list[float], list[float]]:
        """The starts and the ends of all steps by their numbers; at 0, which is no step, both are 0.0."""
        return _times(self._needs, self._durations(costs), _wires(costs))

    def critical_path(self, costs: Costs) -> CriticalPath:
        """The critical path with ``costs``; among several, the one that stays on its ranks."""
        durations, wires = self._durations(costs), _wires(costs)
        starts, ends = _times(self._needs, durations, wires)
        makespan = max(ends)
        step, counts = ends.index(makespan), [0.0] * len(durations)
        halves = {place: pair for pair, place in self._pairs.items()}
        while step:
            before, sender, _, work = self._needs[step - 1]
            if work in halves:
                for half in halves[work]:
                    counts[half] += costs.pair
            else:
                counts[work] += 1
            step = before if ends[before] == starts[step] else sender
        by_stage = batched(counts[: len(_KINDS) * len(costs.stages)], len(_KINDS))
        return CriticalPath(makespan, tuple((f, i + b, w + b) for f, i, w, b in by_stage))

    def makespan(self, seconds: Callable[[Action], float], costs: Costs) -> float:
        """The time from 0 to the last end where every action takes ``seconds`` of its own.

        ``costs`` has the times of messages, and says how long a pair takes.
        """
        needs = ((before, sender, wire, at) for at, (before, sender, wire, _) in enumerate(self._needs))
        durations = [
            costs.of_pair(*map(seconds, actions)) if len(actions) > 1 else sum(map(seconds, actions))
            for actions in self._actions
        ]
        return max(_times(needs, durations, _wires(costs))[1])

    def spans(self, costs: Costs) -> tuple[Span, ...]:
        """Every rank's span; starts and ends are those of ``simulate(schedule, costs)`` to the last digit."""
        seconds = self._durations(costs)
        starts, ends = _times(self._needs, seconds, _wires(costs))
        return tuple(
            Span(starts[own[0]], ends[own[-1]], sum(count * seconds[work] for work, count in counts.items()))
            for own, counts in zip(self.steps, self._work, strict=True)
        )


def _wire(action: Action, schedule: Schedule) -> int:
    """The place in ``_wires`` of the time that the inputs of ``action`` take from other ranks."""
    if action.kind is Kind.S:
        return 1
    ends_in_sums = schedule.placement.shares_vocabulary and action.stage == schedule.placement.stages - 1
    return 2 if ends_in_sums and action.kind in (Kind.I, Kind.B) else 0


def _wires(costs: Costs) -> tuple[float, float, float]:
    shared = costs.vocabulary
    return costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0


def _times(
    needs: Iterable[tuple[int, int, int, int]], durations: Sequence[float], wires: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The starts and ends of all steps, after a 0.0 in place of step 0."""
    starts, ends = [0.0], [0.0]
    for before, sender, wire, work in needs:
        start = ends[before]
        if sender:
            arrival = ends[sender] + wires[wire]
            if arrival > start:
                start = arrival
        starts.append(start)
        ends.append(start + durations[work])
    return starts, ends
