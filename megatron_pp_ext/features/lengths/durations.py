"""The planned times of units of unlike length, by which ranks launch."""

import math

import numpy as np

from megatron_pp_ext.features.lengths.steps import Floats
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind
from megatron_pp_ext.schedule.launch_order import WORK

type Durations = tuple[tuple[int, ...], ...]


def in_whole_numbers(seconds: Floats) -> Durations:
    """Return ``seconds`` as ``Schedule.durations`` has them.

    There is a row for F, I, W and B of each stage in turn, and a column for each unit.
    """
    forward = seconds[OF_STAGES.index(Kind.F) :: len(OF_STAGES)]
    scale = WORK[Kind.F] * forward.size / math.fsum(forward.flat)
    whole = np.maximum(1, np.rint(scale * seconds)).astype(np.int64)
    return tuple(map(tuple, whole.T.tolist()))
