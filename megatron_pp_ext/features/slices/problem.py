"""What is listed: units of unlike cost in chains, ranks with limits, and the arrays of a pass."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""The part of a limit by which sums may be above it."""

FORWARD, INPUT, WEIGHT = range(3)
"""The codes of the kinds of actions; a whole backward is an ``INPUT``."""


class Work(NamedTuple):
    """What stages do with units: ``seconds[kind, stage, unit]``, and what their activations are.

    ``kept[stage, unit]`` is kept from the start of F, ``released`` the part of it that the end of I gives
    back; W gives back the rest.  Where backwards are whole, I has the seconds of both, gives all back, and
    ``splits`` is 0.  ``delays[stage]`` are the seconds of a message between the stage and the next.
    """

    seconds: Floats
    kept: Floats
    released: Floats
    delays: Floats
    splits: int


class Where(NamedTuple):
    """``rank_of[stage]``, and the stages of each rank, the first one in column 0."""

    rank_of: Integers
    stages_of: Integers


class Chains(NamedTuple):
    """The first unit of each chain, the number of its units, and ``seconds`` of work of a mean rank.

    ``kept[rank, chain]`` are all of its activations.
    """

    first: Integers
    size: Integers
    seconds: Floats
    kept: Floats


class Ranks(NamedTuple):
    """What each rank may keep, the most that it has to keep of any one chain, and its work in seconds."""

    limits: Floats
    largest: Floats
    seconds: Floats


class Problem(NamedTuple):
    """The units that are listed, and the ranks that do them."""

    work: Work
    where: Where
    chains: Chains
    ranks: Ranks


class Entry(NamedTuple):
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
    ``kind`` and a ``stage``.  Its ``oldest`` chain is the first one of which it has not done all forwards.
    It keeps ``live``, of which ``ended`` are of the chains before that one.  W that wait are in ``queue``
    from ``head`` to ``tail``.  ``held`` and ``to_come`` are what it keeps, and has yet to keep, of each
    chain.
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


def state_of(problem: Problem) -> State:
    """Return the arrays for passes over the units of ``problem``."""
    stages, units = problem.work.kept.shape
    ranks, chunks = problem.where.stages_of.shape

    def integers(*shape: int) -> Integers:
        return np.zeros(shape, np.int64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape)

    by_chain = ranks, len(problem.chains.first)
    return State(
        unit_at=integers(units),
        chain_at=integers(units),
        back_at=integers(units),
        forward_ends=floats(stages, units),
        input_ends=floats(stages, units),
        forwards=integers(stages),
        inputs=integers(stages),
        free=floats(ranks),
        idle=floats(ranks),
        live=floats(ranks),
        ended=floats(ranks),
        start=floats(ranks),
        oldest=integers(ranks),
        head=integers(ranks),
        tail=integers(ranks),
        kind=integers(ranks),
        stage=integers(ranks),
        queue=integers(ranks, chunks * units),
        held=floats(*by_chain),
        to_come=floats(*by_chain),
    )
