"""The number of microbatches that training without a flush keeps in flight on a worker.

A stage has as many microbatches in flight as its warm-up is deep: with R workers from this stage to the
end and r replicas, ceil(R / r) on each replica (PipeDream, SOSP 2019, section 3.2; NOAM is that of the
input stage).  Each microbatch keeps its activations, and the version of the weights that its forward has
used: n - s versions on stage s of n without replicas.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def versions(downstream: Any) -> Any:
    """Return the weight versions and microbatches in flight of a replica of a stage.

    ``downstream`` is the number of workers after the stage, divided by its replicas.  It is an array of
    fractions such as 5/3; the small number subtracted keeps a whole one from being rounded up.
    """
    return np.ceil(1 + np.asarray(downstream) - 1e-9)


def in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches in flight on a replica of every stage, given the replicas of all stages."""
    return tuple(math.ceil(sum(replicas[stage:]) / count) for stage, count in enumerate(replicas))
