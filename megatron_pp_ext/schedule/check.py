"""Check that a schedule is valid; errors name the rank, the action, and its missing need.

A schedule is valid when every stage does every microbatch once, on the rank that holds the stage, when
every rank does its part of a split head, and when all ranks, each working strictly in its order, reach
their end.  The last condition cannot be checked on any rank alone: it is proved here by letting all ranks
run without a clock.
"""

from collections.abc import Container, Mapping
from itertools import pairwise, zip_longest

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule, delivers, needs
from megatron_pp_ext.schedule.program import Program
from megatron_pp_ext.schedule.walk import Walk, with_copies

_ACTIONS_NAMED = 4
"""The most actions that an error about a circle of waiting ranks names."""


class InvalidSchedule(ValueError):
    """A schedule that cannot run, or that is not one training step."""


def check(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless ``schedule`` is complete, well placed and free of deadlock.

    A schedule without any backward counts as an evaluation, of which only the forwards must be complete.
    """
    is_evaluation = all(action.kind in (Kind.F, Kind.S) for action in schedule)
    _check_actions(schedule)
    _check_stages(schedule, is_evaluation)
    _check_pairs(schedule)
    _check_copies(schedule)
    if schedule.placement.splits_head:
        _check_head(schedule)
    walked(schedule)


def walked(schedule: Schedule, is_repeated: bool = False) -> Walk:
    """Return the walk over all of ``schedule``; InvalidSchedule where no rank can continue before its end."""
    walk = Walk(Program.of(schedule, is_repeated))
    if not walk.is_complete:
        raise InvalidSchedule(_deadlock(schedule, walk))
    return with_copies(walk, schedule) if schedule.copies else walk


def require_one_forward_order(schedule: Schedule) -> None:
    """Raise InvalidSchedule unless all stages take the microbatches forward in one order.

    A valid schedule need not do so.  But a stage that reads its samples one after the other, as Megatron's
    stages do, would then pair one microbatch's output with the labels of another.
    """
    placement = schedule.placement
    forwards: list[list[int]] = [[] for _ in range(placement.stages)]
    for action in schedule:
        if action.kind is Kind.F:
            forwards[action.stage].append(action.microbatch)
    for stage, order in enumerate(forwards):
        for place, (first, other) in enumerate(zip(forwards[0], order, strict=True)):
            if first != other:
                raise InvalidSchedule(
                    f"place {place} of the forwards is microbatch {first} on stage 0 and {other} on stage "
                    f"{stage}, but each reads the next sample: give all stages one order of F"
                )


def _check_actions(schedule: Schedule) -> None:
    """Raise unless every action exists, is on the rank of its stage, and occurs once."""
    placement = schedule.placement
    if schedule.microbatches < 1:
        raise InvalidSchedule(
            f"schedule {schedule.name!r} has {schedule.microbatches} microbatches, needs 1 or more"
        )
    if len(schedule.orders) != placement.ranks:
        raise InvalidSchedule(
            f"schedule {schedule.name!r} orders {len(schedule.orders)} ranks, "
            f"but its placement has {placement.ranks}: give one order a rank"
        )
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            is_of_stage = action.kind in OF_STAGES
            if not is_of_stage and not placement.splits_head:
                raise InvalidSchedule(
                    f"rank {rank}: {action} is a part of the head, which the placement does not split: "
                    "remove it"
                )
            count, unit = (placement.stages, "stages") if is_of_stage else (placement.ranks, "ranks")
            if not 0 <= action.stage < count:
                raise InvalidSchedule(
                    f"rank {rank}: {action} is unknown, {unit} are 0..{count - 1}: remove it"
                )
            if not 0 <= action.microbatch < schedule.microbatches:
                raise InvalidSchedule(
                    f"rank {rank}: {action} is unknown, microbatches are "
                    f"0..{schedule.microbatches - 1}: remove it"
                )
            home = placement.rank_of(action.stage)
            if rank != home:
                raise InvalidSchedule(
                    f"rank {rank}: {action} puts stage {action.stage} on two ranks, "
                    f"its {placement.shape} placement is rank {home}: move it there"
                )
            if action in seen:
                raise InvalidSchedule(f"rank {rank}: {action} is doubled: keep one")
            seen.add(action)


def _check_head(schedule: Schedule) -> None:
    """Raise unless every rank does its part of a split head for every microbatch.

    No rank has a T in an evaluation, nor where the output layer is frozen.
    """
    kinds = [Kind.S, *([Kind.T] if any(action.kind is Kind.T for action in schedule) else [])]
    for rank, order in enumerate(schedule.orders):
        present, first = set(order), schedule.placement.stage_of(rank, 0)
        for microbatch in range(schedule.microbatches):
            for kind in kinds:
                if (action := Action(first, kind, microbatch)) not in present:
                    raise InvalidSchedule(f"rank {rank}: {action} is missing: add it")


def _check_stages(schedule: Schedule, is_evaluation: bool) -> None:
    """Raise unless every stage does a forward and exactly one whole backward of every microbatch."""
    for rank, order in enumerate(schedule.orders):
        present = set(order)
        for stage in schedule.placement.stages_of(rank):
            for microbatch in range(schedule.microbatches):
                forward, i, w, whole = (Action(stage, kind, microbatch) for kind in OF_STAGES)
                if forward not in present:
                    raise InvalidSchedule(f"rank {rank}: {forward} is missing: add it")
                if is_evaluation:
                    continue
                halves = [half for half in (i, w) if half in present]
                if whole in present and halves:
                    raise InvalidSchedule(
                        f"rank {rank}: {whole} and {halves[0]} do the same work twice: keep B, or I with W"
                    )
                if whole not in present and not halves:
                    raise InvalidSchedule(f"rank {rank}: {whole} is missing: add it, or {i} with {w}")
                if len(halves) == 1:
                    absent = w if i in halves else i
                    raise InvalidSchedule(f"rank {rank}: {absent} is missing next to {halves[0]}: add it")


def _check_pairs(schedule: Schedule) -> None:
    """Raise unless every pair is a forward with a backward right after it."""
    if not schedule.paired:
        return
    if schedule.placement.splits_head:
        raise InvalidSchedule(
            f"schedule {schedule.name!r} has pairs, and its ranks split the head: leave one of the two out"
        )
    pairs = set(schedule.paired)
    for rank, order in enumerate(schedule.orders):
        for action, following in zip_longest(order, order[1:]):
            if action not in pairs:
                continue
            pairs.remove(action)
            if action.kind is not Kind.F or following is None or following.kind not in (Kind.I, Kind.B):
                raise InvalidSchedule(
                    f"rank {rank}: {action} begins a pair, and {following or 'nothing'} follows it: a "
                    "pair is an F with an I or a B after it"
                )
    if pairs:
        raise InvalidSchedule(f"{min(pairs)} is to begin a pair, but no rank does it: add it or take it out")


def _check_copies(schedule: Schedule) -> None:
    """Raise unless offloaded activations are freed, then reloaded, between their F and their backward."""
    if not schedule.copies:
        return
    reloads, placement = schedule.copies.reloads, schedule.placement
    for stage, microbatch in sorted(reloads):
        if not (0 <= stage < placement.stages and 0 <= microbatch < schedule.microbatches):
            raise InvalidSchedule(
                f"stage {stage} and microbatch {microbatch} are copied to the host, stages are "
                f"0..{placement.stages - 1} and microbatches 0..{schedule.microbatches - 1}: remove the copy"
            )
    for rank, order in enumerate(schedule.orders):
        place = {action: at for at, action in enumerate(order)}
        seconds = {following for action, following in pairwise(order) if action in schedule.paired}
        for stage in placement.stages_of(rank):
            for microbatch in range(schedule.microbatches):
                if (action := reloads.get((stage, microbatch))) is None:
                    continue
                forward, i, _, whole = (Action(stage, kind, microbatch) for kind in OF_STAGES)
                backward = i if i in place else whole
                if backward not in place:
                    raise InvalidSchedule(
                        f"rank {rank}: {forward} is copied to the host, but has no backward: remove the copy"
                    )
                freed = schedule.copies.frees.get((stage, microbatch), action)
                for step, before, last in (("is reloaded", action, backward), ("is freed", freed, action)):
                    if wrong := _not_between(forward, before, last, place, seconds):
                        raise InvalidSchedule(f"rank {rank}: {forward} {step} before {before}, {wrong}")


def _not_between(
    forward: Action, action: Action, last: Action, place: Mapping[Action, int], seconds: Container[Action]
) -> str:
    """Return why ``action`` is not after ``forward`` and up to ``last``, and the fix; "" if it is."""
    if action not in place:
        return f"which the rank does not do: choose an action between {forward} and {last}"
    if not place[forward] < place[action] <= place[last]:
        return f"which does not stand between it and {last}: choose an action that does"
    if action in seconds:
        first = next(earlier for earlier, at in place.items() if at == place[action] - 1)
        return f"the second of a pair: choose the first, {first}"
    return ""


def _deadlock(schedule: Schedule, walk: Walk) -> str:
    """Describe why ranks wait: for each other in a circle, or for an action that no rank does."""
    orders, paired = schedule.orders, schedule.paired
    begins = walk.program.columns.bounds
    to_come = [order[at - begin :] for order, at, begin in zip(orders, walk.at, begins, strict=False)]
    delivered = {
        delivers(action) for number, action in enumerate(walk.program.actions) if walk.step_of[number]
    }

    def blocked(rank: int) -> tuple[Action, Action]:
        remaining = to_come[rank]
        return next(
            (action, need)
            for action in remaining[: 1 + (remaining[0] in paired)]
            for need in needs(action, schedule.placement)
            if need not in delivered
        )

    actions, is_whole = frozenset(schedule), not schedule.splits_backward

    def as_scheduled(need: Action) -> Action:
        """Return a needed backward as the schedule has it: a whole one is no I (``needs``)."""
        whole = need._replace(kind=Kind.B)
        return (
            whole if need.kind is Kind.I and need not in actions and (is_whole or whole in actions) else need
        )

    rank = next(rank for rank, remaining in enumerate(to_come) if remaining)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        action, need = blocked(rank)
        rank = schedule.placement.rank_of(need.stage)
        if all(delivers(other) != need for other in to_come[rank]):
            lacking = as_scheduled(need)
            return f"rank {path[-1]}: {action} waits for {lacking}, which no rank does: add it to rank {rank}"
    circle = path[path.index(rank) :]
    waits = [(r, *blocked(r)) for r in circle]
    links = [f"rank {r}: {action} waits for {as_scheduled(need)}" for r, action, need in waits]
    if len(links) > _ACTIONS_NAMED:
        links[_ACTIONS_NAMED:] = [f"and {len(links) - _ACTIONS_NAMED} more ranks"]
    return f"deadlock: {', '.join(links)}: reorder one of them"
