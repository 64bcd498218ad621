"""List scheduling of units of unlike cost within what each rank may keep.

Whenever a rank is free it does the action that can start first, and of several the one with the first
*priority*.  Either an input gradient comes before a forward, and a weight gradient where the rank would wait
otherwise; or actions have the places of a schedule whose order they follow as far as memory lets them.  Every
stage takes the units forward in their order, and back chain by chain, each in reverse.

A *reservation* keeps ranks from waiting for each other.  Chains end in the order in which they begin, so a
rank takes memory for a chain only if each one that has yet to take some would still fit once those before it
are done.  Memory is taken by forwards, and by the input gradient of a chain's last unit for the sums that it
owes to the others.  Any input gradient has *headroom* besides: its workspace, and what it leaves to its W
beyond what its forward kept.  W give theirs back at any time, so headroom is that of one input gradient, and
it is left free by all that is reserved.  A rank whose next input gradient does not fit does W first.  Then
the oldest chain can always go on, on all ranks, and no order gets stuck as long as each chain alone fits.

*Gaps* keep ranks from filling their memory too soon.  Chains that enter the pipeline right after each other
go through it as one wave, and ranks wait until it comes back.  So the first stage may let time pass between
units, and between chains.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.request import LARGEST
from megatron_pp_ext.features.units.microbatches import require_number
from megatron_pp_ext.features.units.table import Floats, Integers, Table
from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule
from megatron_pp_ext.schedule.loops import part_of_loop, without_collection
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import OWN, P2P, B, F, I, W

ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""


class Where(NamedTuple):
    """``rank_of[stage]``, the stages of each rank, the first in column 0, and the wire to each next stage."""

    rank_of: Integers
    stages_of: Integers
    wire: Integers


class Chains(NamedTuple):
    """The first unit of each chain, the number of its units, and ``seconds`` of work of a mean rank.

    ``kept[rank, chain]`` is all the memory that it takes there, and ``takes[rank, chain]`` the number of
    actions that take it.
    """

    first: Integers
    size: Integers
    seconds: Floats
    kept: Floats
    takes: Integers


class Ranks(NamedTuple):
    """Each rank's limit, headroom, the most memory that any one chain takes, and its work in seconds."""

    limits: Floats
    headroom: Floats
    largest: Floats
    seconds: Floats

    @property
    def least(self) -> Floats:
        """The lowest limit of each rank."""
        return self.largest + self.headroom


class ListRules(NamedTuple):
    """``priority[kind, stage, place * each]`` of F, I and W, where a whole backward has that of an I.

    ``is_whole[stage, place * each]`` is whether the unit's backward is.  ``each`` is 0 where all places have
    the same, else 1.  ``reserves`` is whether chains are reserved.
    """

    priority: Integers
    is_whole: NDArray[np.bool_]
    each: int
    reserves: bool


class EntryTimes(NamedTuple):
    """When units enter the pipeline: ``order`` are the chains in their order.

    The first stage starts a unit no sooner after the one before than ``pace`` of the work of a mean rank for
    a mean unit of the same chain.  After the last unit of a chain, ``gaps[chain]`` of the work of the whole
    chain come on top.
    """

    order: Integers
    gaps: Floats
    pace: float


class State(NamedTuple):
    """The arrays of one pass, which the next one uses again.

    A *place* is the number of a unit in the forward order of the pass.  The ends of F are by stage and
    place, those of I by stage and number in the order of I.

    Each rank is ``free`` from some time on, was ``idle`` for so long, and is to ``start`` an action of a
    ``kind`` and a ``stage``.  It keeps ``live``, of which ``waiting`` is what W give back that wait.  These
    are in ``queue`` from ``head`` to ``tail``, by their priority.  ``held`` and ``to_come`` are what it keeps
    of each chain besides, and has yet to take, in so many ``takes``.  Its ``oldest`` chain is the first one
    for which it has any to come, and it holds ``ended`` of those before.
    """

    unit_at: Integers
    chain_at: Integers
    back_at: Integers
    forward_ends: Floats
    input_ends: Floats
    forwards: Integers
    inputs: Integers
    free: Floats
    idle: Floats
    live: Floats
    waiting: Floats
    ended: Floats
    start: Floats
    oldest: Integers
    head: Integers
    tail: Integers
    kind: Integers
    stage: Integers
    queue: Integers
    held: Floats
    to_come: Floats
    takes: Integers


class Listing(NamedTuple):
    """The units in chains, the ranks that do them, and the rules of the list."""

    where: Where
    chains: Chains
    ranks: Ranks
    rules: ListRules
    state: State


def listing_of(
    units: Units, table: Table, placement: Placement, limits: Sequence[float] | Floats, rules: ListRules
) -> Listing:
    """Return the listing of ``units`` with the costs of ``table``, within the ``limits`` of ranks.

    ValueError for limits that are none (``bounded``), and for more actions than are simulated.
    """
    if (actions := 3 * placement.stages * len(units)) > LARGEST:
        raise ValueError(
            f"{len(units):,} units on {placement.stages:,} stages make {actions:,} actions, but at most "
            f"{LARGEST:,} are planned: give more tokens to a unit, or a shorter step"
        )
    where = Where(
        np.array([placement.rank_of(stage) for stage in range(placement.stages)]),
        np.array([placement.stages_of(rank) for rank in range(placement.ranks)]),
        np.array(
            [OWN if placement.is_local(stage) else P2P for stage in range(placement.stages - 1)], np.int64
        ),
    )
    first = np.array([chain.start for chain in units.chains])
    owed = np.add.reduceat(table.owed, first, axis=1)
    kept = (np.add.reduceat(table.kept[F], first, axis=1) + owed)[where.stages_of].sum(axis=1)
    each = table.seconds[F] + np.where(rules.is_whole, table.seconds[B], table.seconds[I] + table.seconds[W])
    seconds = np.add.reduceat(each.sum(axis=0), first) / placement.ranks
    sizes = np.array([len(chain) for chain in units.chains])
    takes = sizes * placement.chunks + (owed > 0)[where.stages_of].sum(axis=1)
    headroom = np.where(rules.is_whole, table.taken[B], table.taken[I]) - table.owed
    ranks = Ranks(
        bounded(limits, placement) * (1 + ROUNDING),
        headroom.max(axis=1)[where.stages_of].max(axis=1),
        kept.max(axis=1),
        each.sum(axis=1)[where.stages_of].sum(axis=1),
    )
    return Listing(where, Chains(first, sizes, seconds, kept, takes), ranks, rules, _state(placement, units))


def bounded(limits: Sequence[float] | Floats, placement: Placement) -> Floats:
    """Return the ``limits`` of all ranks; ValueError for another number of them, and for one that is none."""
    if not isinstance(limits, Sequence | np.ndarray) or len(limits) != placement.ranks:
        raise ValueError(
            f"the memory limits are {limits!r:.40}, but there are {placement.ranks} ranks: give one to each"
        )
    for rank, limit in enumerate(limits):
        require_number(f"the memory limit of rank {rank}", limit, "above 0", math.inf)
    return np.array(limits, float)


def free_rules(placement: Placement, splits_backward: bool) -> ListRules:
    """Return the rules of no schedule: I before F, later stages first, and W where a rank would wait."""
    priority = np.empty((3, placement.stages, 1), np.int64)
    for rank in range(placement.ranks):
        for number, stage in enumerate(reversed(placement.stages_of(rank))):
            priority[:, stage] = number
    priority[F] += placement.chunks
    priority[W] = 2 * placement.chunks
    return ListRules(priority, np.full((placement.stages, 1), not splits_backward), 0, True)


def rules_of(schedule: Schedule, reserves: bool) -> ListRules:
    """Return the rules that follow the order of ``schedule``, which has no pairs and copies."""
    shape = schedule.placement.stages, schedule.microbatches
    priority, is_whole = np.zeros((3, *shape), np.int64), np.zeros(shape, np.bool_)
    codes = {Kind.F: F, Kind.I: I, Kind.W: W, Kind.B: I}
    for order in schedule.orders:
        for place, action in enumerate(order):
            priority[codes[action.kind], action.stage, action.microbatch] = place
            is_whole[action.stage, action.microbatch] |= action.kind is Kind.B
    return ListRules(priority, is_whole, 1, reserves)


def orders_of(actions: Integers, rules: ListRules, units: int) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of all ranks, by the numbers that ``listed`` has filled in."""
    stages, capacity = len(rules.is_whole), 1 << (units - 1).bit_length()
    row = actions // units
    place = actions - row * units
    if rules.is_whole.any():
        is_input = (row >= I * stages) & (row < (I + 1) * stages)
        row += (B - I) * stages * (is_input & rules.is_whole[row % stages, place * rules.each])
    each = _actions(stages, capacity)[row * capacity + place]
    counts = (actions >= 0).sum(axis=1).tolist()
    return tuple(tuple(of_rank[:count].tolist()) for of_rank, count in zip(each, counts, strict=True))


@lru_cache(maxsize=4)
def _actions(stages: int, capacity: int) -> NDArray[np.object_]:
    """Return all actions of ``capacity`` units, by ``(kind * stages + stage) * capacity + unit``.

    To make them takes as long as to list them, so that later plans have the same ones.
    """
    every = np.empty(len(OF_STAGES) * stages * capacity, object)
    with without_collection():
        every[:] = [
            Action(stage, kind, unit)
            for kind in OF_STAGES
            for stage in range(stages)
            for unit in range(capacity)
        ]
    return every


def lower_bound(listing: Listing, table: Table) -> float:
    """Return a makespan that no schedule of these units is below, where all backwards are whole, or none is.

    It is the largest of three.  A rank cannot begin before the quickest unit has come to it, and has all its
    work to do then; where backwards are whole, the last input gradient has yet to go to the first stage.
    Before its first input gradient a rank does no more forwards than it can keep, however long it waits.
    And each chain takes the time of its own way through all stages and back: its units follow each other
    through every stage, of which the slowest holds them up.
    """
    where, chains, ranks, rules, _ = listing
    is_whole, delays = bool(rules.is_whole.all()), table.delays[where.wire]
    forward, back = table.seconds[F], table.seconds[B if is_whole else I]
    heads = _arrivals(forward, delays).min(axis=1)
    tails = _arrivals(back, delays).min(axis=1)
    backwards = _first_backwards(forward, back, delays, chains)
    sizes, times = _of_chains(table.kept[F], forward, chains)
    least = 0.0
    for rank, stages in enumerate(where.stages_of):
        tail = float(tails[stages[0]]) if is_whole else 0.0
        head, first = float(heads[stages[0]]), float(backwards[stages.max()])
        before = _within(sizes[stages], times[stages], float(ranks.limits[rank]))
        waited = max(head, first - before)
        least = max(least, waited + float(ranks.seconds[rank]) + tail)
    bounds = [*chains.first.tolist(), forward.shape[1]]
    of_units = (forward + back).sum(axis=0)
    for begin, end in sorted(pairwise(bounds), key=lambda ends: -float(of_units[slice(*ends)].sum())):
        if float(of_units[begin:end].sum()) + 2 * float(delays.sum()) <= least:
            break  # the work of a chain is no less than its time, and others have less
        way_back = _flow(back[::-1, begin:end][:, ::-1], delays[::-1])
        least = max(least, _flow(forward[:, begin:end], delays) + way_back)
    return least


def _first_backwards(forward: Floats, back: Floats, delays: Floats, chains: Chains) -> Floats:
    """Return for each stage how soon the first of all backwards can start there.

    It is that of a chain's last unit, after all forwards of the chain in every stage.
    """
    first, last = chains.first, chains.first + chains.size - 1
    heads, whole = _arrivals(forward[:, first], delays), np.add.reduceat(forward, first, axis=1)
    tails = _arrivals(forward[::-1][:, last], delays[::-1])[::-1]
    turned = (heads + whole + tails).max(axis=0)
    on_the_way = _arrivals(back[::-1][:, last], delays[::-1])[::-1]
    soonest: Floats = (turned + on_the_way).min(axis=1)
    return soonest


def _of_chains(kept: Floats, seconds: Floats, chains: Chains) -> tuple[Floats, Floats]:
    """Return what forwards of each stage and chain keep, and the most seconds that so much memory is for.

    Units of a chain go forward in their order, so the seconds are those of its best beginning.
    """
    sizes, rates = kept.cumsum(axis=1), seconds.cumsum(axis=1)
    for array, each in ((sizes, kept), (rates, seconds)):
        before = array[:, chains.first] - each[:, chains.first]
        array -= np.repeat(before, chains.size, axis=1)
    whole = sizes[:, chains.first + chains.size - 1]
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that keep nothing bound nothing
        best = np.maximum.reduceat(rates / sizes, chains.first, axis=1)
        return whole, best * whole


def _within(kept: Floats, seconds: Floats, limit: float) -> float:
    """Return the most of ``seconds`` whose memory ``kept`` is ``limit`` in all; a part counts as a part."""
    sizes, times = kept.ravel(), seconds.ravel()
    if sizes.sum() <= limit:
        return math.inf
    order = np.argsort(sizes / times, kind="stable")
    sizes, times = sizes[order], times[order]
    ends = sizes.cumsum()
    count = int(np.searchsorted(ends, limit, side="right"))
    rest = limit - (float(ends[count - 1]) if count else 0.0)
    return float(times[:count].sum() + times[count] * rest / sizes[count])


def _arrivals(seconds: Floats, delays: Floats) -> Floats:
    """Return for each stage and unit how long the stages before take, with the messages between."""
    before = np.cumsum(seconds[:-1] + delays[:, None], axis=0)
    return np.concatenate([np.zeros((1, seconds.shape[1])), before])


def _flow(seconds: Floats, delays: Floats) -> float:
    """Return how long units take through all stages, one after the other in each."""
    head = _arrivals(seconds, delays)[:, 0]
    tail = _arrivals(seconds[::-1], delays[::-1])[::-1][:, -1]
    return float((head + seconds.sum(axis=1) + tail).max())


def _state(placement: Placement, units: Units) -> State:
    count, stages, ranks = len(units), placement.stages, placement.ranks

    def integers(*shape: int) -> Integers:
        return np.zeros(shape, np.int64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape)

    by_chain = ranks, len(units.chains)
    return State(
        unit_at=integers(count),
        chain_at=integers(count),
        back_at=integers(count),
        forward_ends=floats(stages, count),
        input_ends=floats(stages, count),
        forwards=integers(stages),
        inputs=integers(stages),
        free=floats(ranks),
        idle=floats(ranks),
        live=floats(ranks),
        waiting=floats(ranks),
        ended=floats(ranks),
        start=floats(ranks),
        oldest=integers(ranks),
        head=integers(ranks),
        tail=integers(ranks),
        kind=integers(ranks),
        stage=integers(ranks),
        queue=integers(ranks, placement.chunks * count),
        held=floats(*by_chain),
        to_come=floats(*by_chain),
        takes=integers(*by_chain),
    )


@part_of_loop
def listed(listing: Listing, table: Table, entry: EntryTimes, until: float, actions: Integers) -> float:
    """Return when the last action ends; infinite where that is known to be after ``until``, or never.

    Fills ``actions[rank]`` with ``(kind * stages + stage) * units + place`` of each.
    """
    where, chains, ranks, rules, state = listing
    priority, is_whole, each, reserves = rules
    stages, units = len(state.forwards), len(state.unit_at)
    count, chunks = where.stages_of.shape
    _begin(chains, entry, state)
    filled = np.zeros(count, np.int64)
    changed, changes = np.arange(count), count
    release = entered = last = 0.0
    splits = is_whole.size - is_whole.sum()
    for _ in range(2 * stages * units + splits * units * stages // is_whole.size):
        for at in range(changes):
            rank = changed[at]
            free = state.free[rank]
            start, first, kind, stage = np.inf, 0, -1, -1
            lacks_memory = False
            for chunk in range(chunks - 1, -1, -1):
                choice = where.stages_of[rank, chunk]
                done, place = state.inputs[choice], state.forwards[choice]
                ready = np.inf
                if choice == stages - 1:
                    if done < units and state.back_at[done] < place:
                        ready = max(free, state.forward_ends[choice, state.back_at[done]])
                elif done < state.inputs[choice + 1]:
                    ready = max(free, state.input_ends[choice + 1, done] + table.delays[where.wire[choice]])
                if ready <= start and ready < np.inf:
                    at_place = state.back_at[done]
                    number = priority[I, choice, each * at_place]
                    if ready < start or number < first:
                        unit, row = state.unit_at[at_place], I * stages + choice
                        if is_whole[choice, each * at_place]:
                            row = B * stages + choice
                        taken, owed = table.taken[row, unit], table.owed[choice, unit]
                        if state.live[rank] + taken > ranks.limits[rank] or not (
                            owed == 0 or _fits(ranks, state, rank, owed, state.chain_at[at_place], reserves)
                        ):
                            lacks_memory = lacks_memory or ready <= free
                        else:
                            start, first, kind, stage = ready, number, I, choice
                if place == (state.forwards[choice - 1] if choice else units):
                    continue
                ready = max(free, release)
                if choice:
                    ready = state.forward_ends[choice - 1, place] + table.delays[where.wire[choice - 1]]
                    ready = max(free, ready)
                if ready <= start:
                    number = priority[F, choice, each * place]
                    if ready < start or number < first:
                        amount = table.kept[F * stages + choice, state.unit_at[place]]
                        if _fits(ranks, state, rank, amount, state.chain_at[place], reserves):
                            start, first, kind, stage = ready, number, F, choice
            if state.head[rank] < state.tail[rank] and free <= start:
                number = state.queue[rank, state.head[rank]]
                waiting = number // units
                is_first = priority[W, waiting, each * (number - waiting * units)] < first
                if free < start or is_first or (lacks_memory and kind == F):
                    start, kind = free, W
            state.start[rank], state.kind[rank], state.stage[rank] = start, kind, stage
        rank, start = 0, state.start[0]
        for other in range(1, count):
            if state.start[other] < start:
                rank, start = other, state.start[other]
        kind, stage = state.kind[rank], state.stage[rank]
        if start == np.inf:
            return np.inf
        if kind == F and stage == 0:
            entered, start = start, state.free[rank]  # in the step nothing waits for a gap
        state.idle[rank] += start - state.free[rank]
        if state.idle[rank] + ranks.seconds[rank] > until:
            return np.inf
        changed[0], changes = rank, 1
        if kind == F:
            place = state.forwards[stage]
            unit, chain = state.unit_at[place], state.chain_at[place]
            end = start + table.seconds[F * stages + stage, unit]
            state.forward_ends[stage, place] = end
            state.forwards[stage] += 1
            _take(state, rank, chain, table.kept[F * stages + stage, unit])
            if stage < stages - 1:
                changed[1], changes = where.rank_of[stage + 1], 2
            if stage == 0:
                number = entry.order[chain]
                gap = entry.pace / chains.size[number]
                if place + 1 < units and state.chain_at[place + 1] != chain:
                    gap += entry.gaps[number]
                release = entered + gap * chains.seconds[number]
        elif kind == I:
            done = state.inputs[stage]
            place = state.back_at[done]
            unit = state.unit_at[place]
            whole = is_whole[stage, each * place]
            row = (B if whole else I) * stages + stage
            end = start + table.seconds[row, unit]
            state.input_ends[stage, done] = end
            state.inputs[stage] += 1
            chain, owed, for_weights = state.chain_at[place], table.owed[stage, unit], 0.0
            if owed > 0:
                _take(state, rank, chain, owed)
            if not whole:
                for_weights = -table.kept[W * stages + stage, unit]
                state.waiting[rank] += for_weights
            _release(state, rank, chain, owed - table.kept[row, unit] + for_weights)
            state.live[rank] += for_weights
            if not whole:
                state.queue[rank, state.tail[rank]] = stage * units + place
                state.tail[rank] += 1
                if each:
                    _sort_in(state.queue[rank, state.head[rank] : state.tail[rank]], priority, units)
            if stage:
                changed[1], changes = where.rank_of[stage - 1], 2
        else:
            number = state.queue[rank, state.head[rank]]
            stage = number // units
            place = number - stage * units
            unit = state.unit_at[place]
            state.head[rank] += 1
            end = start + table.seconds[W * stages + stage, unit]
            for_weights = -table.kept[W * stages + stage, unit]
            state.waiting[rank] -= for_weights
            state.live[rank] -= for_weights
        state.free[rank] = end
        last = max(last, end)
        actions[rank, filled[rank]] = (kind * stages + stage) * units + place
        filled[rank] += 1
    return last


@part_of_loop
def _begin(chains: Chains, entry: EntryTimes, state: State) -> None:
    """Let nothing be done yet, with the chains in their order."""
    place, ranks = 0, len(state.free)
    for at in range(len(entry.order)):
        chain = entry.order[at]
        size = chains.size[chain]
        for number in range(size):
            state.unit_at[place + number] = chains.first[chain] + number
            state.chain_at[place + number] = at
            state.back_at[place + number] = place + size - 1 - number
        place += size
        for rank in range(ranks):
            state.held[rank, at], state.to_come[rank, at] = 0.0, chains.kept[rank, chain]
            state.takes[rank, at] = chains.takes[rank, chain]
    for stage in range(len(state.forwards)):
        state.forwards[stage] = state.inputs[stage] = 0
    for rank in range(ranks):
        state.free[rank] = state.idle[rank] = state.live[rank] = state.ended[rank] = 0.0
        state.waiting[rank] = 0.0
        state.oldest[rank] = state.head[rank] = state.tail[rank] = 0


@part_of_loop
def _fits(ranks: Ranks, state: State, rank: int, amount: float, chain: int, reserves: bool) -> bool:
    """Whether a rank that takes ``amount`` for ``chain`` leaves what the reservation is for."""
    limit = ranks.limits[rank]
    if state.live[rank] + amount > limit:
        return False
    limit -= ranks.headroom[rank]
    behind = state.live[rank] - state.waiting[rank] + amount
    if behind > limit or not reserves:
        return behind <= limit
    behind -= state.ended[rank]
    for other in range(state.oldest[rank], chain):
        if behind + ranks.largest[rank] <= limit:
            return True
        if behind + state.to_come[rank, other] > limit:
            return False
        behind -= state.held[rank, other]
    return behind + state.to_come[rank, chain] - amount <= limit


@part_of_loop
def _take(state: State, rank: int, chain: int, amount: float) -> None:
    """Count what an action takes for ``chain``, and the chains that take no more after it."""
    state.live[rank] += amount
    state.held[rank, chain] += amount
    state.to_come[rank, chain] -= amount
    state.takes[rank, chain] -= 1
    while state.oldest[rank] < state.held.shape[1] and state.takes[rank, state.oldest[rank]] == 0:
        state.ended[rank] += state.held[rank, state.oldest[rank]]
        state.oldest[rank] += 1


@part_of_loop
def _release(state: State, rank: int, chain: int, amount: float) -> None:
    """Count what a backward gives back, or leaves to its W."""
    state.live[rank] -= amount
    state.held[rank, chain] -= amount
    if chain < state.oldest[rank]:
        state.ended[rank] -= amount


@part_of_loop
def _sort_in(queue: Integers, priority: Integers, units: int) -> None:
    """Move the last W of a ``queue``, which is sorted, to its place by its priority."""
    at, number = len(queue) - 1, queue[-1]
    first = priority[W, number // units, number % units]
    while at and priority[W, queue[at - 1] // units, queue[at - 1] % units] > first:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = number
