"""A program: the actions of all ranks in their order, and what each waits for, as columns of numbers.

An action goes by its number: those of the first rank come first, in its order, then those of the next.  A
column has a number for each action.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, NamedTuple

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Orders, Schedule, needs
from megatron_pp_ext.schedule.loops import Loop
from megatron_pp_ext.schedule.placement import Placement

type Column = Any
"""A list of numbers, or an array of them."""


class Lists:
    """Makes columns that are lists."""

    def of(self, values: Iterable[float], kind: type = int) -> Column:
        """Return a column of ``values`` of this ``kind``, int or float."""
        return list(values)

    def zeros(self, count: int, kind: type = int) -> Column:
        """Return a column of so many zeros."""
        return [kind(0)] * count

    def repeated(self, values: Iterable[int], times: Iterable[int]) -> Column:
        """Return a column with each of ``values`` so many ``times``."""
        return list(chain.from_iterable(map(repeat, values, times)))

    def taken(self, values: Column, places: Column) -> Column:
        """Return the ``values`` at ``places``."""
        return [values[place] for place in places]

    def order(self, values: Column) -> Column:
        """Return the places of ``values`` by their size; equal ones stay in their order."""
        return sorted(range(len(values)), key=values.__getitem__)


class Arrays(Lists):
    """Makes columns that are arrays."""

    def __init__(self) -> None:
        import numpy  # which takes a while, and a single schedule needs none

        self._numpy = numpy

    def of(self, values: Iterable[float], kind: type = int) -> Column:
        """Return a column of ``values`` of this ``kind``, int or float."""
        return self._numpy.fromiter(values, kind)

    def zeros(self, count: int, kind: type = int) -> Column:
        """Return a column of so many zeros."""
        return self._numpy.zeros(count, kind)

    def repeated(self, values: Iterable[int], times: Iterable[int]) -> Column:
        """Return a column with each of ``values`` so many ``times``."""
        return self._numpy.repeat(self.of(values), self.of(times))

    def taken(self, values: Column, places: Column) -> Column:
        """Return the ``values`` at ``places``."""
        return values[places]

    def order(self, values: Column) -> Column:
        """Return the places of ``values`` by their size; equal ones stay in their order."""
        return self._numpy.argsort(values, kind="stable")


def as_list(column: Column) -> list[Any]:
    """Return ``column`` as a list."""
    return column if isinstance(column, list) else column.tolist()


KINDS = (*OF_STAGES, Kind.S, Kind.T)
F, I, W, B, S, T = range(len(KINDS))
"""The codes of the kinds of actions."""

_CODES = bytes.maketrans("".join(KINDS).encode(), bytes(range(len(KINDS))))
_DELIVERED = {Kind.F: 0, Kind.I: 1, Kind.S: 2}
"""Kinds of actions that others wait for; a whole backward delivers as its I would."""

WIRES = P2P, HIDDEN, SUMS, OWN = range(4)
"""The wires over which an output comes.

They lead from stage to stage, from the last stage to a rank's part of a split head, from all of these
to the backward of the last stage, and there from the one of the same rank.
"""

NO_WORK, PAIRS = 2, 3
"""Places of durations after the stages, S and T: one for no work, then the pairs."""


class Columns(NamedTuple):
    """Columns of a program for compiled loops.

    Each action has a ``stage``, the code of its ``kind``, a ``microbatch``, its ``rank`` and the ``place`` of
    its duration: four for each stage, then S, T, no work and the different pairs; the first action of a pair
    has the pair's.  Rank r has the actions from ``bounds[r]`` to ``bounds[r + 1]``.

    Action a waits for those in ``needed`` from ``begins[a]`` to ``begins[a + 1]``, over ``wires``.  One that
    is not here has the number after the last, and never ends.
    """

    stage: Column
    kind: Column
    microbatch: Column
    rank: Column
    place: Column
    bounds: Column
    begins: Column
    needed: Column
    wires: Column


class Program:
    """Actions of stages as in ``placement``, whose ranks need not be the program's.

    ``pairs`` are the places of the two durations of each different pair, and the pair's own.  ``durations``
    are the schedule's.
    """

    def __init__(
        self,
        placement: Placement,
        stage: Column,
        kind: Column,
        microbatch: Column,
        bounds: Column,
        firsts: Sequence[int] = (),
        is_open: bool = False,
        durations: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take columns, which are all lists or all arrays, and the numbers of actions that begin pairs.

        Where ``is_open``, actions that are missing were done before, and nobody waits for them.
        """
        self.durations = durations
        self.make = make = Lists() if isinstance(stage, list) else Arrays()
        self.placement, self.count, self.ranks = placement, len(stage), len(bounds) - 1
        sizes = (end - begin for begin, end in pairwise(as_list(bounds)))
        rank = make.repeated(range(self.ranks), sizes)
        numbers = set(as_list(microbatch)) or {0}
        first, microbatches = min(numbers), 1 + max(numbers) - min(numbers)
        makers = make.repeated([self.count], [len(_DELIVERED) * placement.stages * microbatches])
        most = 2 * self.count + placement.splits_head * placement.ranks * microbatches
        needs = make.zeros(self.count + 1), make.zeros(most), make.zeros(most)
        place = make.zeros(self.count)
        self.columns = Columns(stage, kind, microbatch, rank, place, bounds, *needs)
        table = tuple(map(make.of, _waits(placement)))
        _find(self.columns, *table, placement.stages, first, microbatches, is_open, makers)
        self.pairs: dict[tuple[int, int], int] = {}
        for number in firsts:
            halves = int(place[number]), int(place[number + 1])
            place[number] = self.pairs.setdefault(halves, self.no_work + 1 + len(self.pairs))

    @classmethod
    def of(cls, schedule: Schedule, is_repeated: bool = False) -> "Program":
        """Return the program of ``schedule``, whose columns are arrays if ``is_repeated``."""
        return cls.of_orders(Orders.of(schedule), is_repeated=is_repeated)

    @classmethod
    def of_orders(cls, orders: Orders, *, is_open: bool = False, is_repeated: bool = False) -> "Program":
        """Return the program of ``orders``; where it ``is_open``, what they wait for may be done before."""
        of = Arrays().of if is_repeated else Lists().of
        actions, paired = list(chain.from_iterable(orders.by_rank)), orders.paired
        stages, kinds, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
        columns = of(stages), of("".join(kinds).encode().translate(_CODES)), of(microbatches)
        firsts = [number for number, action in enumerate(actions) if action in paired] if paired else []
        bounds = of([0, *accumulate(map(len, orders.by_rank))])
        return cls(orders.placement, *columns, bounds, firsts, is_open, orders.durations)

    @cached_property
    def actions(self) -> list[Action]:
        stage, kind, microbatch, *_ = map(as_list, self.columns)
        return list(map(Action, stage, map(KINDS.__getitem__, kind), microbatch))

    @property
    def no_work(self) -> int:
        """The place of the duration of no work."""
        return len(OF_STAGES) * self.placement.stages + NO_WORK


@lru_cache(maxsize=256)
def _waits(placement: Placement) -> tuple[list[int], list[int], list[int]]:
    """Return the needs of actions of every stage and kind, the stage's kinds in a row.

    These are columns of where the needs of each begin, of what they are (three rows of stages, by
    ``_DELIVERED``), and of the wires.

    ``actions.needs`` alone defines the needs of an action; this is a table of them.
    """
    begins, needed, wires = [0], [], []
    for stage in range(placement.stages):
        for kind in KINDS:
            for need in needs(Action(stage, kind, 0), placement):
                needed.append(_DELIVERED[need.kind] * placement.stages + need.stage)
                is_sums = need.kind is Kind.S and kind is not Kind.T
                wires.append(HIDDEN if kind is Kind.S else SUMS if is_sums else P2P)
            begins.append(len(needed))
    return begins, needed, wires


@Loop
def _find(
    columns: Columns,
    table_begins: Column,
    table_needed: Column,
    table_wires: Column,
    stages: int,
    first: int,
    microbatches: int,
    is_open: bool,
    makers: Column,
) -> None:
    """Fill in places and needs; ``makers`` has the action that makes each result."""
    stage, kind, microbatch, _, place, _, begins, needed, wires = columns
    count = len(kind)
    for action in range(count):
        code = kind[action]
        is_of_stage = code <= B
        place[action] = 4 * stage[action] + code if is_of_stage else 4 * stages + code - S
        row = 0 if code == F else 2 if code == S else -1 if code in (W, T) else 1
        if row >= 0:
            makers[(row * stages + stage[action]) * microbatches + microbatch[action] - first] = action
    filled = 0
    for action in range(count):
        work = 6 * stage[action] + kind[action]
        for entry in range(table_begins[work], table_begins[work + 1]):
            need = makers[table_needed[entry] * microbatches + microbatch[action] - first]
            if need < count or not is_open:
                needed[filled] = need
                wires[filled] = table_wires[entry]
                filled += 1
        begins[action + 1] = filled
