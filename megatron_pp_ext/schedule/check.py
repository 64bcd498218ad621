"""Check that a schedule is valid; errors name the rank, the action, and what it waits for.

A schedule is valid when every stage does every microbatch once, on the rank that holds the stage, when
every rank does its part of a shared vocabulary, and when all ranks, each working strictly in its order, reach
their end.  The last condition cannot be checked on any rank alone: it is proved here by letting all ranks
run without a clock.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule, delivers, needs

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
    if schedule.placement.shares_vocabulary:
        _check_vocabulary(schedule)
    for _ in in_order_of_need(schedule):
        pass


def in_order_of_need(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Yield (rank, action, the actions it needs) for all actions, each after everything it needs.

    Ranks keep their own order.  Backwards among the needed actions are named as by ``needs``.  Raises
    InvalidSchedule at the point where no rank can continue.
    """
    finished: list[tuple[int, Action]] = []
    placement = schedule.placement
    for rank, action, inputs in walk(
        schedule.orders, lambda action: needs(action, placement), schedule.paired
    ):
        yield rank, action, inputs
        finished.append((rank, action))
    if len(finished) < sum(map(len, schedule.orders)):
        raise InvalidSchedule(_deadlock(schedule, finished))


def walk(
    orders: Sequence[Sequence[Action]],
    inputs_of: Callable[[Action], tuple[Action, ...]],
    paired: frozenset[Action] = frozenset(),
) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Let all ranks run without a clock: yield (rank, action, its inputs), each action after its inputs.

    ``inputs_of`` returns the inputs, named as by ``delivers``.  The iteration ends where no rank can
    continue, whether or not all of ``orders`` are done.  The two actions of a pair (``Schedule.paired``)
    come one right after the other, behind the inputs of both.
    """
    position = [0] * len(orders)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while position[rank] < len(order):
            first = position[rank]
            actions = order[first : first + 1 + (order[first] in paired)]
            inputs = [inputs_of(action) for action in actions]
            missing = next((need for of_one in inputs for need in of_one if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            for action, needed in zip(actions, inputs, strict=True):
                yield rank, action, needed
            position[rank] += len(actions)
            for action in actions:
                delivered = delivers(action)
                done.add(delivered)
                runnable.extend(waiting.pop(delivered, ()))


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
        for place, (first, here) in enumerate(zip(forwards[0], order, strict=True)):
            if first != here:
                raise InvalidSchedule(
                    f"place {place} of the forwards is microbatch {first} on stage 0 and {here} on stage "
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
            if not is_of_stage and not placement.shares_vocabulary:
                raise InvalidSchedule(
                    f"rank {rank}: {action} is a part of the vocabulary, which the placement does not share: "
                    "remove it"
                )
            count, what = (placement.stages, "stages") if is_of_stage else (placement.ranks, "ranks")
            if not 0 <= action.stage < count:
                raise InvalidSchedule(
                    f"rank {rank}: {action} is unknown, {what} are 0..{count - 1}: remove it"
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


def _check_vocabulary(schedule: Schedule) -> None:
    """Raise unless every rank does its part of a shared vocabulary for every microbatch.

    No rank has a T in an evaluation, nor where the output layer is frozen.
    """
    kinds = [Kind.S, *([Kind.T] if any(action.kind is Kind.T for action in schedule) else [])]
    for rank, order in enumerate(schedule.orders):
        present = set(order)
        for microbatch in range(schedule.microbatches):
            for kind in kinds:
                if (action := Action(rank, kind, microbatch)) not in present:
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
                    raise InvalidSchedule(f"rank {rank}: {absent} is missing beside {halves[0]}: add it")


def _check_pairs(schedule: Schedule) -> None:
    """Raise unless every pair is a forward with a backward right behind it."""
    if not schedule.paired:
        return
    if schedule.placement.shares_vocabulary:
        raise InvalidSchedule(
            f"schedule {schedule.name!r} has pairs, and its ranks share the vocabulary: leave one of the two "
            "out"
        )
    left = set(schedule.paired)
    for rank, order in enumerate(schedule.orders):
        for action, behind in zip_longest(order, order[1:]):
            if action not in left:
                continue
            left.remove(action)
            if action.kind is not Kind.F or behind is None or behind.kind not in (Kind.I, Kind.B):
                raise InvalidSchedule(
                    f"rank {rank}: {action} begins a pair, and {behind or 'nothing'} stands behind it: a "
                    "pair is an F with an I or a B behind it"
                )
    if left:
        raise InvalidSchedule(f"{min(left)} is to begin a pair, but no rank does it: add it or take it out")


def _deadlock(schedule: Schedule, finished: Sequence[tuple[int, Action]]) -> str:
    """Describe why ranks wait: for each other in a circle, or for an action that no rank does."""
    position = Counter(rank for rank, _ in finished)
    done = {delivers(action) for _, action in finished}

    def blocked(rank: int) -> tuple[Action, Action]:
        first = position[rank]
        order = schedule.orders[rank]
        return next(
            (action, need)
            for action in order[first : first + 1 + (order[first] in schedule.paired)]
            for need in needs(action, schedule.placement)
            if need not in done
        )

    rank = next(r for r, order in enumerate(schedule.orders) if position[r] < len(order))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        action, wanted = blocked(rank)
        rank = schedule.placement.rank_of(wanted.stage)
        to_come = schedule.orders[rank][position[rank] :]
        if all(delivers(other) != wanted for other in to_come):
            return f"rank {path[-1]}: {action} waits for {wanted}, which no rank does: add it to rank {rank}"
    circle = path[path.index(rank) :]
    links = [f"rank {r}: {{}} waits for {{}}".format(*blocked(r)) for r in circle]
    if len(links) > _ACTIONS_NAMED:
        links[_ACTIONS_NAMED:] = [f"and {len(links) - _ACTIONS_NAMED} more ranks"]
    return f"deadlock: {', '.join(links)}: reorder one of them"
