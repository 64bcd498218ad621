"""1F1B-V: two thirds of 1F1B's memory with a whole backward (arXiv 2405.15362, whose 1F1B-V it is).

The V placement levels memory over the ranks also when the backward is not split, which spares a
user the deferred weight gradients.  One microbatch goes down and up at one tick a rank, and back
down and up at two, the length of a whole backward; six ticks a rank are a period.  At a constant
step of two, backwards would fall on ticks that forwards have taken: after every third rank the way
back waits half a period, so that a rank's four actions keep to four places of the period.

The repeated block is a timetable with idle ticks at both ends.  ``_squeeze`` goes through it in
the order of time and moves every action to the first gap of its rank that its inputs and the
block's memory allow: the paper's rewriting of warm-up and cool-down.

The order that repeats is made for a backward of twice the forward's length.  At other times it
keeps a bubble in every period for some numbers of ranks, 4, 7 and 8 among them; V-Half has none.
"""

from bisect import bisect
from collections.abc import Iterable
from operator import itemgetter

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, delivers, needs
from megatron_pp_ext.schedule.placement import Placement, v

_PERIOD = 6
_TICKS = {Kind.F: 1, Kind.B: 2}


def build(ranks: int, microbatches: int) -> Schedule:
    """1F1B-V for any ranks >= 2 and microbatches >= 1.

    At unit cost the peak is 2 * floor((2p + 3) / 3) chunks and, for m >= p, the makespan 6m + 5p
    less 5, 7 or 9 for a p of 3k + 1, 3k + 2 or 3k (6m + 4, 8, 22 at p = 2, 3, 6).
    """
    placement = v(ranks)
    timetable = sorted(
        (tick + _PERIOD * microbatch, Action(stage, kind, microbatch))
        for (stage, kind), tick in _block(ranks).items()
        for microbatch in range(microbatches)
    )
    orders = _squeeze((action for _, action in timetable), placement, cap=2 * ((2 * ranks + 3) // 3))
    return Schedule("1f1b-v", placement, microbatches, orders)


def _block(ranks: int) -> dict[tuple[int, Kind], int]:
    """Return the tick at which one microbatch meets each stage, forward and backward."""
    starts = {(stage, Kind.F): stage for stage in range(2 * ranks)}
    # Where the way back turns and when it first waits, so that no two actions share a tick.
    turn, passed = {0: (4, 2), 1: (1, 0), 2: (4, 0)}[ranks % 3]
    tick = 2 * ranks - 1 + turn
    for stage in reversed(range(2 * ranks)):
        starts[stage, Kind.B] = tick
        passed += 1
        tick += _TICKS[Kind.B] + (_PERIOD // 2 if passed % 3 == 0 else 0)
    return starts


def _squeeze(timetable: Iterable[Action], placement: Placement, cap: int) -> tuple[tuple[Action, ...], ...]:
    """Put each action, first to last, into the first gap that it fits; return the orders.

    Wherever a forward goes, its rank never keeps more than ``cap`` chunks.
    """
    home = [placement.rank_of(stage) for stage in range(placement.stages)]
    ends: dict[Action, int] = {}
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(placement.ranks)]
    live = [0] * placement.ranks
    for action in timetable:
        rank, ticks = home[action.stage], _TICKS[action.kind]
        row = rows[rank]
        before = delivers(action._replace(microbatch=action.microbatch - 1))
        start = max(ends.get(need, 0) for need in (before, *needs(action, placement)))
        if action.kind is Kind.F:
            start = max(start, _last_full(row, live[rank], cap, start))
        at = bisect(row, start, key=itemgetter(0))
        if at > 0:
            previous, other = row[at - 1]
            start = max(start, previous + _TICKS[other.kind])
        while at < len(row) and row[at][0] < start + ticks:
            start = row[at][0] + _TICKS[row[at][1].kind]
            at += 1
        row.insert(at, (start, action))
        live[rank] += 1 if action.kind is Kind.F else -1
        ends[delivers(action)] = start + ticks
    return tuple(tuple(action for _, action in row) for row in rows)


def _last_full(row: list[tuple[int, Action]], live: int, cap: int, earliest: int) -> int:
    """Return the tick until which a rank keeps ``cap`` chunks, or ``earliest`` if that is later.

    ``live`` is the number of chunks that it keeps after all actions of ``row``.
    """
    for start, action in reversed(row):
        if start < earliest:
            break
        live += -1 if action.kind is Kind.F else 1
        if live >= cap:
            return start + _TICKS[action.kind]
    return earliest
