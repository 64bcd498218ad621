"""The actions of a schedule as arrays, for what has to go through all of them."""

from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from megatron_pp_ext.schedule.actions import OF_STAGES, Kind
from megatron_pp_ext.schedule.messages import Orders

F, I, W, B, S, T = range(6)
"""The codes of the kinds of actions; those of a stage come first, as in ``OF_STAGES``."""

_CODES = np.full(128, -1, np.int8)
for _code, _kind in enumerate((*OF_STAGES, Kind.S, Kind.T)):
    _CODES[ord(_kind)] = _code

type Array = Any
"""A numpy array."""


class ActionArrays(NamedTuple):
    """The stage, the code of the kind and the microbatch of every action, rank after rank.

    The actions of rank r are those from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    stage: Array
    kind: Array
    microbatch: Array
    bounds: Array

    def of_rank(self, rank: int) -> slice:
        """Return where the actions of ``rank`` are."""
        return slice(self.bounds[rank], self.bounds[rank + 1])


def action_arrays(orders: Orders) -> ActionArrays:
    """Return the actions of ``orders`` as arrays."""
    stages, kinds, microbatches = zip(*chain.from_iterable(orders), strict=True)
    letters = np.frombuffer("".join(kinds).encode(), np.uint8)
    return ActionArrays(
        np.array(stages, np.int32),
        _CODES[letters],
        np.array(microbatches, np.int32),
        np.array([0, *accumulate(map(len, orders))]),
    )
