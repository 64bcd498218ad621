"""The reader for orders that are written down as a table of phases, as papers and figures explain them."""

from collections import Counter
from collections.abc import Iterable

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import Placement


def order_of(phases: Iterable[tuple[str, int]], rank: int, placement: Placement) -> tuple[Action, ...]:
    """Return the order of ``rank`` that ``phases`` describe: their words, and how often they are repeated.

    A word is a kind of action and a chunk of the rank: ``F0`` is the forward of chunk 0 for its next
    microbatch, ``I0`` and ``B0`` are the two spellings of its next backward.  ``W0`` is the oldest
    weight gradient that an I of chunk 0 has left to do, and ``W`` the oldest of any chunk.
    """
    stages = placement.stages_of(rank)
    order: list[Action] = []
    left: list[Action] = []
    following: Counter[tuple[int, bool]] = Counter()
    for phase, times in phases:
        for word in phase.split() * times:
            kind, chunk = Kind(word[0]), word[1:]
            if kind is Kind.W:
                action = next(action for action in left if not chunk or action.stage == stages[int(chunk)])
                left.remove(action)
            else:
                stage = stages[int(chunk)]
                action = Action(stage, kind, following[stage, kind is Kind.F])
                following[stage, kind is Kind.F] += 1
            if kind is Kind.I:
                left.append(action._replace(kind=Kind.W))
            order.append(action)
    return tuple(order)
