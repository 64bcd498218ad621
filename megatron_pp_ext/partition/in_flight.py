"""What flush-free training keeps on a worker.

A stage has as many microbatches in flight as its warm-up is deep: with R workers from this stage to the
end and r replicas, ceil(R / r) on each replica (PipeDream, SOSP 2019, section 3.2; NOAM is that of the
input stage).  Each keeps its activations, and the weights that its forward has used: n - s versions of
them on stage s of n without replicas.  Gradients and the optimizer's state are not counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def versions(behind: Any) -> Any:
    """Weight versions and microbatches in flight of a replica, ``behind`` workers a replica behind its stage.

    ``behind`` is an array of fractions such as 5/3, so a whole number may come out a rounding above itself.
    """
    return np.ceil(1 + np.asarray(behind) - 1e-9)


def in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """``versions`` of every stage of a pipeline, given all stages' replicas."""
    return tuple(math.ceil(sum(replicas[stage:]) / count) for stage, count in enumerate(replicas))
