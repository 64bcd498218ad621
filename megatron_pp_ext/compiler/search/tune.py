"""Search for the best building block at the real costs, and for how strictly to follow it.

The block is one microbatch's timetable.  It starts as the microbatch's own way through the stages
with a pause after every station, of one length for each of the legs down and up the ranks: pauses of
0 and 0 ticks, with F = I = W of one tick, are V-Min's block, 1 and 0 are V-Half's, and 3 and 1 are
V-ZB's (arXiv 2405.15362, figure 3).  Small random changes then adapt pauses, turns, single stations,
the first and the last microbatches and the waiting of the list schedule to the costs and the limit.  A
change is kept when the list schedule gets no longer.

All numbers are integers and the random generator draws integers only, so that every machine walks the
same way.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from megatron_pp_ext.compiler.search.list_scheduling import DueRules, Knobs, list_makespan
from megatron_pp_ext.compiler.search.problem import NEVER, Problem, with_value

_SUB = 64
"""Block times are in 1/64 of the problem's time unit: finer than any action, so due times rarely tie."""

_LONG = 1 << 50
"""A time longer than any that occurs."""

# The values with which plans start.  Pauses on the way down and on the way up, slacks and patiences are in
# quarters of a tick, periods in quarters of a microbatch's work.  With a short period a rank prefers to begin
# microbatches, with a long one to finish them.
_PAUSES = ((0, 0), (4, 0), (0, 4), (12, 4), (8, 2), (2, 2), (4, 4))
_LEG_PAUSES = (0, 0, 1, 2, 4, 8)
_SLACKS = (0, 2, 8, 16, _LONG)
_PATIENCES = (0, 2, 4)
_PERIODS = (2, 3, 4, 4, 6, 8)

_EDGE = 8
"""The number of microbatches with a jitter, both at the beginning and at the end."""

_CHAINS = 4
"""The number of starting points that are improved side by side."""


@dataclass(frozen=True, order=True, slots=True)
class BlockPlan:
    """A building block and the rules by which a list schedule follows it.

    ``pauses`` (one a leg), ``turns`` (one between two legs), ``shifts`` (one a station), ``period``,
    ``jitter``, and of the ``rules`` the delay of W and the slack, are in 1/64 time units; the two patiences
    are in time units.  Microbatches follow each other one ``period`` apart; ``jitter`` is added for the first
    and the last of them, in warm-up and cool-down.
    """

    pauses: tuple[int, ...]
    turns: tuple[int, ...]
    shifts: tuple[int, ...]
    period: int
    rules: DueRules
    jitter: tuple[int, ...]

    def knobs(self, problem: Problem) -> Knobs:
        """Return the parameters of the list schedule."""
        ranks = problem.placement.ranks
        due = []
        now = 0
        for station, shift in enumerate(self.shifts):
            due.append(now + shift)
            leg, at = divmod(station, ranks)
            now += _SUB * (problem.duration[station] + problem.delay[station])
            if at < ranks - 1:
                now += self.pauses[leg]
            elif leg < len(self.turns):
                now += self.turns[leg]
        gaps = [self.period] * problem.microbatches
        for at in range(min(_EDGE, len(gaps))):
            gaps[at] += self.jitter[at]
            gaps[-1 - at] += self.jitter[-1 - at]
        return Knobs(tuple(due), tuple(gaps), self.rules)


Found = tuple[int, BlockPlan]
"""A makespan and the plan that has it."""


def tune(problem: Problem, trials: int, random: Random, *, each_leg: bool) -> list[Found]:
    """Return the best plans after ``trials`` list schedules, one a chain, shortest first.

    The list is empty if every list schedule got stuck.  A third of the trials are starting points, a third
    is spent on all chains alike, and a sixth each on the better two and on the best.  With ``each_leg``, half
    of the starting points have an independent pause for every leg: a wave's legs need not go in pairs.
    """
    plans = best(problem, {_start(problem, random, each_leg) for _ in range(max(1, trials // 3))})
    for share, chains in ((3, _CHAINS), (6, _CHAINS // 2), (6, 1)):
        for chain, start in enumerate(plans[:chains]):
            plans[chain] = improve(problem, start, trials // (share * chains), random)
        plans.sort()
    return plans


def improve(problem: Problem, start: Found, trials: int, random: Random) -> Found:
    """Walk from ``start`` in ``trials`` random changes, each kept unless it makes the schedule longer."""
    length, plan = start
    tick = _tick(problem)
    for _ in range(trials):
        changed = plan
        for _ in range(random.choice((1, 1, 2, 3))):
            changed = _change(changed, tick, random)
        new = _length(problem, changed, length)
        if new is not None and new <= length:
            length, plan = new, changed
    return length, plan


def best(problem: Problem, plans: Iterable[BlockPlan]) -> list[Found]:
    """Return the shortest few of ``plans``, shortest first."""
    shortest: list[Found] = []
    for plan in plans:
        length = _length(problem, plan, shortest[-1][0] if len(shortest) == _CHAINS else NEVER)
        if length is not None:
            shortest = sorted([*shortest, (length, plan)])[:_CHAINS]
    return shortest


def _length(problem: Problem, plan: BlockPlan, longest: int = NEVER) -> int | None:
    return list_makespan(problem, plan.knobs(problem), longest)


def _work(problem: Problem) -> int:
    return max(problem.work) // problem.microbatches


def _tick(problem: Problem) -> int:
    """Return the mean time of an action, in time units."""
    return max(1, _work(problem) // (3 * problem.placement.chunks))


def _period(problem: Problem) -> int:
    """Return the time from one microbatch to the next, by the work of a rank or, far below V-Min, its memory.

    By Little's law a rank keeps the activations of as many microbatches as begin while one is on its way.
    """
    stages = problem.placement.stages
    steps = map(sum, zip(problem.duration, problem.delay, strict=False))
    starts = tuple(accumulate(steps, initial=0))
    areas = [0] * problem.placement.ranks
    for stage in range(stages):
        gradient = 2 * stages - 1 - stage
        way = starts[gradient] - starts[stage] + problem.duration[gradient]
        weight = problem.duration[problem.weight_of(gradient)]
        areas[problem.home[stage]] += problem.kept[stage] * (way + weight)
    # A rank that keeps nothing may have a limit of nothing.
    limited = zip(areas, problem.limits, strict=True)
    by_memory = max((area // limit for area, limit in limited if area), default=0)
    work = _work(problem)
    # Plans start with up to twice this period, so a little more than the work's is among them anyway.
    return by_memory if by_memory > 2 * work else work


def _start(problem: Problem, random: Random, each_leg: bool) -> BlockPlan:
    """Draw a published kind of block or one between two of them, to be followed more or less strictly."""
    legs = 2 * problem.placement.chunks
    quarter = _tick(problem) * _SUB // 4
    pauses = random.choice(_PAUSES)
    slack = random.choice(_SLACKS)
    patience = random.choice(_PATIENCES) * _tick(problem) // 4
    by_leg = pauses * problem.placement.chunks
    if each_leg and random.randrange(2):
        by_leg = tuple(random.choice(_LEG_PAUSES) for _ in range(legs))
    return BlockPlan(
        pauses=tuple(pause * quarter for pause in by_leg),
        turns=(0,) * (legs - 1),
        shifts=(0,) * problem.stations,
        period=_period(problem) * _SUB * random.choice(_PERIODS) // 4,
        rules=DueRules(
            weight_delay=random.choice((_LONG, _LONG, 16 * quarter)),
            slack=slack if slack == _LONG else slack * quarter,
            patience=patience,
            weight_patience=patience,
            frees_memory=random.randrange(2) == 0,
        ),
        jitter=(0,) * (2 * _EDGE),
    )


def _change(plan: BlockPlan, tick: int, random: Random) -> BlockPlan:
    fine = tick * _SUB
    match random.randrange(12):
        case 0:
            leg = random.randrange(len(plan.pauses))
            pause = max(-fine // 2, plan.pauses[leg] + random.randrange(-fine // 2, fine // 2 + 1))
            return replace(plan, pauses=with_value(plan.pauses, leg, pause))
        case 1:
            leg = random.randrange(len(plan.turns))
            turn = plan.turns[leg] + random.randrange(-2 * fine, 2 * fine + 1)
            return replace(plan, turns=with_value(plan.turns, leg, turn))
        case 2:
            slack = random.choice((0, 1, 2, 4, 8, 16, 32, _LONG))
            if slack < _LONG:
                slack = slack * fine // 4 + random.randrange(fine)
            return _with_rules(plan, slack=slack)
        case 3:
            return _with_rules(plan, patience=random.randrange(tick + tick // 4 + 1))
        case 4:
            return _with_rules(plan, weight_patience=random.randrange(tick + tick // 4 + 1))
        case 5:
            delay = _LONG if random.randrange(2) else random.randrange(16 * fine)
            return _with_rules(plan, weight_delay=delay)
        case 6:
            shifts = plan.shifts
            for _ in range(3):
                station = random.randrange(len(shifts))
                shift = shifts[station] + random.randrange(-2 * fine, 2 * fine + 1)
                shifts = with_value(shifts, station, shift)
            return replace(plan, shifts=shifts)
        case 7:
            return replace(plan, shifts=with_value(plan.shifts, random.randrange(len(plan.shifts)), 0))
        case 8:
            return _with_rules(plan, frees_memory=not plan.rules.frees_memory)
        case 9 | 10:
            at = random.randrange(len(plan.jitter))
            jitter = plan.jitter[at] + random.randrange(-2 * fine, 2 * fine + 1)
            return replace(plan, jitter=with_value(plan.jitter, at, jitter if random.randrange(4) else 0))
        case _:
            return replace(plan, period=plan.period * random.randrange(950, 1100) // 1000)


def _with_rules(plan: BlockPlan, **changes: Any) -> BlockPlan:
    return replace(plan, rules=plan.rules._replace(**changes))
