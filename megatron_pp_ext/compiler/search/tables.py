"""A problem as arrays, and random numbers, for the compiled loops."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.search.problem import Problem
from megatron_pp_ext.schedule.loops import part_of_loop

Integers = NDArray[np.int64]

CODE = np.int32
"""The type of a code in an array of orders."""


class Tables(NamedTuple):
    """The numbers of a ``Problem``, by its names.  ``own[r]`` are the stations of rank r.

    A limit is no higher than all that is ever kept together.
    """

    stages: int
    microbatches: int
    duration: Integers
    delay: Integers
    home: Integers
    kept: Integers
    growth: Integers
    limits: Integers
    own: Integers


@lru_cache(maxsize=64)
def tables(problem: Problem) -> Tables:
    """Return the arrays of ``problem``."""
    most = problem.microbatches * sum(problem.growth)
    limits = [min(limit, most) for limit in problem.limits]
    return Tables(
        problem.placement.stages,
        problem.microbatches,
        *(
            np.array(values, np.int64)
            for values in (
                problem.duration,
                problem.delay,
                problem.home,
                problem.kept,
                problem.growth,
                limits,
                problem.stations_by_rank,
            )
        ),
    )


_FACTOR = np.uint64(6364136223846793005)
_STEP = np.uint64(1442695040888963407)
_UPPER = np.uint64(33)


def generator(seed: int) -> NDArray[np.uint64]:
    """Return the state of a generator of random numbers, an array of one number."""
    return np.array([seed], np.uint64)


@part_of_loop
def draw(state: NDArray[np.uint64], below: int) -> int:
    """Return a random number from 0 to ``below`` - 1, at most 2**31, and move ``state`` on.

    It is the upper half of a linear congruential generator's state (Knuth, The Art of Computer Programming 2,
    section 3.3.4), whose product wraps round at 64 bits.
    """
    state[0] = state[0] * _FACTOR + _STEP
    return np.int64(state[0] >> _UPPER) % below  # type: ignore[return-value]
