"""Formulas for the seconds that a microbatch keeps the worker of a stage, or the link of a cut, busy.

The paper's formulas (PipeDream, SOSP 2019, section 3.1) and those of its authors' public optimizer
differ, so both are offered.  With T the seconds of the stage on one replica, W its bytes of
weights, r its replicas, a the bytes that cross a cut and B the bandwidth in bytes a second:

               stage                            cut
    paper      max(T, 2 (r-1) W / B) / r        2 a / B, between two stages
    reference  (T + 4 (r-1) W / (B r)) / r      2 a / (B r), on both sides of every stage but the first

In the paper gradients travel while the next microbatch computes; in the optimizer the worker waits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class CostFormulas(NamedTuple):
    """The two formulas of the dynamic programme; their numbers may be arrays, which broadcast.

    ``stage(seconds, weights, replicas, bandwidth, shared_by)`` returns the seconds of a stage for one
    microbatch; ``shared_by`` is the number of workers of a replica that share the sending of its gradients.

    ``cut(bytes_in, bytes_out, replicas, bandwidth)`` returns the seconds of the links of a stage, which is
    not the first, for one microbatch; ``bytes_in`` cross the cut before the stage, ``bytes_out`` the cut
    after it, 0 where nothing follows.
    """

    stage: Callable[[Any, Any, Any, float, int], Any]
    cut: Callable[[Any, float, Any, float], Any]


PAPER = CostFormulas(
    stage=lambda seconds, weights, replicas, bandwidth, _: (
        np.maximum(seconds, 2 * (replicas - 1) * weights / bandwidth) / replicas
    ),
    # Each cut counts once, as the input of the stage after it.
    cut=lambda bytes_in, _, replicas, bandwidth: 2 * bytes_in / bandwidth,
)
"""The formulas of the paper, in which workers do not share the sending of gradients."""

REFERENCE = CostFormulas(
    stage=lambda seconds, weights, replicas, bandwidth, shared_by: (
        (seconds + 4 * (replicas - 1) * weights / (bandwidth * replicas) / shared_by) / replicas
    ),
    cut=lambda bytes_in, bytes_out, replicas, bandwidth: (
        2 * np.maximum(bytes_in, bytes_out) / (bandwidth * replicas)
    ),
)
"""The formulas of github.com/msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py.

In a hierarchy the optimizer divides the gradients among the workers of a machine, though only for a stage
that begins with the block's first layer.
"""

MEMORY = CostFormulas(
    stage=lambda worker_bytes, weights, replicas, bandwidth, _: worker_bytes,
    cut=lambda bytes_in, bytes_out, replicas, bandwidth: 0.0,
)
"""Formulas with which the programme minimises the bytes of the fullest worker instead of seconds.

Replicas do not make these bytes fewer, and a cut adds none.
"""

FORMULAS = {"paper": PAPER, "reference": REFERENCE}
"""The formulas by their names for ``mpp partition --cost``."""
