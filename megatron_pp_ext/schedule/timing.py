"""Times a schedule with costs, as often as there are costs: spans, the critical path, the makespan."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched, pairwise

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.check import walked
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.program import Column, as_list


def lenders(order: Sequence[Action], paired: frozenset[Action]) -> list[tuple[int, int]]:
    """Return the places (of I, of W) in a rank's ``order`` of each I that runs products of a W.

    No I after the rank's last F does: other ranks wait for its output, and products inside would delay that.
    The last I of a stage takes none and its last W lends none, since gradients are complete with them.  Nor
    does a W lend to an I that is ``paired`` with a forward.

    A whole backward computes a layer's weight gradient while the gradient of the layer's input is on its way
    to the other tensor-parallel ranks.  An I has no such product of its own: it takes the products of the
    next W of its rank, whose own I has come before, or is this very one.  At most the rank's parts of a split
    head, S and T, come between the two.  The order of actions stays as it is.

    A W that comes after a forward could lend as well.  But an I with products inside ends later, for which
    other ranks wait, and no family takes less time then.
    """
    last = {(action.stage, action.kind): place for place, action in enumerate(order)}
    last_forward = max((place for (_, kind), place in last.items() if kind is Kind.F), default=0)
    place_of = {action: place for place, action in enumerate(order) if action.kind is Kind.I}
    lent = []
    latest = 0  # the last action that is no part of a split head
    for place, action in enumerate(order):
        input = order[latest]
        if action.kind is Kind.W and input.kind is Kind.I:
            is_last = place == last[action.stage, Kind.W] or latest == last[input.stage, Kind.I]
            is_ready = place_of[action._replace(kind=Kind.I)] <= latest < last_forward
            if is_ready and not is_last and not (latest and order[latest - 1] in paired):
                lent.append((latest, place))
        if action.kind not in (Kind.S, Kind.T):
            latest = place
    return lent


_USUAL = StageCosts(1.0, 1.15, 0.85, lent=0.35, hidden_beside=0.2)
_USUAL_HEAD = HeadCosts(scores=0.2, weight_gradient=0.1)
"""Costs by which W that lend products are chosen: of layers of transformers under TP 4 to 8."""


@dataclass(frozen=True, slots=True)
class RankSpan:
    """The times at which a rank starts its first action and ends its last one, and its working time."""

    start: float
    end: float
    busy: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The actions that follow each other without a wait up to the last end, which is ``makespan``.

    ``work[s]`` are the numbers of F, I and W of stage s among them, and of whole backwards, each an I and a W
    that save ``StageCosts.hidden``; an action in a pair counts as ``Costs.pair``.  With any other costs of
    the stages the same actions still wait for each other, so that no makespan is below their sum.
    """

    makespan: float
    work: tuple[tuple[float, float, float, float], ...]


class ScheduleTimer:
    """Times ``schedule``; with ``is_repeated`` by compiled loops.

    Raises InvalidSchedule (see ``check``) when the ranks wait for each other.

    A rank works strictly in its order.  An action starts as soon as the action before it on its rank has
    ended and what it needs from other ranks has arrived: at most one message, or what the ranks exchange
    about a split head.  A pair starts as soon as this holds for both of its actions.
    """

    def __init__(self, schedule: Schedule, is_repeated: bool = False) -> None:
        self.schedule, self.walk = schedule, walked(schedule, is_repeated)

    @cached_property
    def steps(self) -> list[list[int]]:
        """The steps of each rank's actions by their numbers; the two of a pair have the same."""
        step_of, bounds = as_list(self.walk.step_of), as_list(self.walk.program.columns.bounds)
        return [step_of[first:end] for first, end in pairwise(bounds)]

    def times(self, costs: Costs) -> tuple[Column, Column]:
        """The starts and the ends of all steps by their numbers; at 0, which is no step, both are 0."""
        if not costs.are_alike:
            return self._times_of_each(map(costs.seconds, self.walk.program.actions), costs)
        if self._lends(costs):
            return self._times_of_each(self._with_lent(costs, self._lending), costs)
        return self.walk.times(self._durations(costs), _delays(costs))

    def _lends(self, costs: Costs) -> bool:
        """Whether products run during messages of an I, so that actions of a stage take unlike times."""
        return any(stage.hidden_beside and stage.lent for stage in costs.stages) and bool(self._lending)

    @cached_property
    def lenders(self) -> list[list[tuple[int, int]]]:
        """The places (of I, of W) in each rank's order of I that run products of W; see ``lenders``.

        There are none where a step is shorter without, at usual costs: the choice follows from the schedule
        alone.
        """
        schedule, stages = self.schedule, self.schedule.placement.stages
        lending = [lenders(order, schedule.paired) for order in schedule.orders]
        if not any(lending):
            return lending
        costs = Costs((_USUAL,) * stages, head=_USUAL_HEAD if schedule.placement.splits_head else None)
        without, with_lending = (
            max(as_list(self._times_of_each(self._with_lent(costs, lending), costs)[1]))
            for lending in ([], self._numbers(lending))
        )
        return lending if with_lending < without else [[] for _ in lending]

    def _numbers(self, lending: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
        """Return the numbers of the actions at the places of ``lending`` in each rank's order."""
        begins = as_list(self.walk.program.columns.bounds)
        return [
            (begin + input, begin + weight)
            for begin, places in zip(begins, lending, strict=False)
            for input, weight in places
        ]

    @cached_property
    def _lending(self) -> list[tuple[int, int]]:
        return self._numbers(self.lenders)

    def critical_path(self, costs: Costs) -> CriticalPath:
        """The critical path with ``costs``; among several, the one that stays on its ranks."""
        starts, ends = self.times(costs)
        makespan, counts = self.walk.critical(starts, ends, costs.pair)
        by_stage = batched(counts[: len(OF_STAGES) * len(costs.stages)], len(OF_STAGES))
        return CriticalPath(makespan, tuple((f, i + b, w + b, b) for f, i, w, b in by_stage))

    def makespan(self, seconds: Callable[[Action], float], costs: Costs) -> float:
        """The time from 0 to the last end where every action takes ``seconds`` of its own.

        ``costs`` has the times of messages, and how long a pair takes.
        """
        every = map(seconds, self.walk.program.actions)
        return max(as_list(self._times_of_each(every, costs)[1]))

    def _times_of_each(self, seconds: Iterable[float], costs: Costs) -> tuple[Column, Column]:
        copies = [stage.copy for stage in costs.stages]
        return self.walk.times_of_each(list(seconds), _delays(costs), costs.of_pair, copies)

    def _with_lent(self, costs: Costs, lending: Sequence[tuple[int, int]]) -> list[float]:
        """Return the seconds of every action where the I run products of the W, both by number."""
        actions, kinds = self.walk.program.actions, self._kinds
        took = {
            kind: costs.seconds(action) for kind, action in dict(zip(kinds, actions, strict=True)).items()
        }
        seconds = [took[kind] for kind in kinds]
        for input, weight in lending:
            lent = costs.stages[actions[weight].stage].lent
            seconds[input] += lent - min(costs.stages[actions[input].stage].hidden_beside, lent)
            seconds[weight] -= lent
        return seconds

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """The stage and the kind of each action, by whose numbers equal actions are found faster."""
        stages, kinds, *_ = self.walk.program.columns
        return list(zip(as_list(stages), as_list(kinds), strict=True))

    def spans(self, costs: Costs) -> tuple[RankSpan, ...]:
        """Every rank's span; starts and ends equal ``simulate(schedule, costs)`` to the last digit."""
        starts, ends = self.times(costs)
        return tuple(
            RankSpan(float(starts[steps[0]]), float(ends[steps[-1]]), busy)
            for steps, busy in zip(self.steps, self._busy(costs, starts, ends), strict=True)
        )

    def _busy(self, costs: Costs, starts: Column, ends: Column) -> list[float]:
        if not costs.are_alike or self._lends(costs):
            return [
                sum(float(ends[step] - starts[step]) for step in dict.fromkeys(steps)) for steps in self.steps
            ]
        seconds = self._durations(costs)
        return [sum(count * seconds[place] for place, count in work.items()) for work in self._work]

    @cached_property
    def _work(self) -> list[Counter[int]]:
        places = as_list(self.walk.steps.place)
        return [Counter(map(places.__getitem__, dict.fromkeys(steps))) for steps in self.steps]

    def _durations(self, costs: Costs) -> list[float]:
        """The seconds of each stage's kinds of action, of the split head, of pairs and of copies."""
        shared = costs.head
        of_head = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        of_stage = {id(stage): [stage.seconds(kind) for kind in OF_STAGES] for stage in costs.stages}
        unpaired = [*(took for stage in costs.stages for took in of_stage[id(stage)]), *of_head, 0.0]
        pairs = self.walk.program.pairs
        copies = [stage.copy for stage in costs.stages] if self.walk.copies else []
        return [
            *unpaired,
            *(costs.of_pair(unpaired[first], unpaired[second]) for first, second in pairs),
            *copies,
        ]


def lenders_of(schedule: Schedule, rank: int) -> dict[Action, Action]:
    """Return the W whose products run inside each I of ``rank`` that has any; see ``ScheduleTimer.lenders``.

    Units of unlike length have no usual costs.  There every W may lend.
    """
    order = schedule.orders[rank]
    places = lenders(order, schedule.paired)
    if places and not (schedule.units or schedule.durations):
        places = ScheduleTimer(schedule).lenders[rank]
    return {order[input]: order[weight] for input, weight in places}


def _delays(costs: Costs) -> tuple[float, ...]:
    shared = costs.head
    return costs.hop, shared.hidden if shared else 0.0, shared.sums if shared else 0.0, 0.0
