"""1F1B's three phases, and the reader of orders that are tables of phases; families share both."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import Placement

type Phases = Iterable[tuple[str, int]]
"""Phases of a rank: their words, and how often they are repeated."""


def alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Return ``warm_up`` of ``forwards``, alternating forwards and backwards, the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    in_turn = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *in_turn, *backwards[len(forwards) - warm_up :]]


def order_of(phases: Phases, rank: int, placement: Placement) -> tuple[Action, ...]:
    """Return the order of ``rank`` that ``phases`` describe.

    A word is a kind of action and a chunk of the rank: ``F0`` is the forward of chunk 0 for its next
    microbatch, ``I0`` and ``B0`` are the two spellings of its next backward.  ``W0`` is the oldest
    weight gradient that an I of chunk 0 has left to do, and ``W`` the oldest of any chunk.  ``F0+B1`` is a
    pair, which is listed by ``pairs_of``.
    """
    return tuple(chain.from_iterable(_read(phases, rank, placement)))


def pairs_of(phases: Phases, rank: int, placement: Placement) -> list[tuple[Action, Action]]:
    """Return the pairs in the order of ``rank`` that ``phases`` describe, each a forward and a backward."""
    words = _read(phases, rank, placement)
    return [(actions[0], actions[1]) for actions in words if len(actions) > 1]


def _read(phases: Phases, rank: int, placement: Placement) -> Iterator[list[Action]]:
    stages = placement.stages_of(rank)
    pending: list[Action] = []
    following: Counter[tuple[int, bool]] = Counter()

    def action_of(part: str) -> Action:
        kind, chunk = Kind(part[0]), part[1:]
        if kind is Kind.W:
            action = next(action for action in pending if not chunk or action.stage == stages[int(chunk)])
            pending.remove(action)
            return action
        stage = stages[int(chunk)]
        action = Action(stage, kind, following[stage, kind is Kind.F])
        following[stage, kind is Kind.F] += 1
        if kind is Kind.I:
            pending.append(action._replace(kind=Kind.W))
        return action

    for phase, times in phases:
        for word in phase.split() * times:
            yield [action_of(part) for part in word.split("+")]
