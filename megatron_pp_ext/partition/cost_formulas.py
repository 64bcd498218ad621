"""Formulas for the seconds that a microbatch keeps the worker of a stage, or the link of a cut, busy.

The paper's formulas (PipeDream, SOSP 2019, section 3.1) and those of its authors' public optimizer
differ, and neither is that of today's links.  With T the seconds of the stage on one replica, W its bytes of
weights, r its replicas, a the bytes that cross a cut and B the bandwidth in bytes a second:

               stage                                       cut
    paper      max(T, 2 (r-1) W / B) / r                   2 a / B, between two stages
    reference  (T + 4 (r-1) W / (B r)) / r                 2 a / (B r), around every stage but the first
    links      max(T, (a + a' + 2 (r-1) W / r) / B) / r    nothing more

In the paper gradients travel while the next microbatch computes; in the optimizer the worker waits.
``links`` counts what a worker's link carries that sends and receives at the same time.  While a replica does
one microbatch, of r, it sends the activations of the cut behind it, a', the gradients of the cut before it,
a, and its part of one ring all-reduce of the weights' gradients.  It receives as much.  All of this travels
while other microbatches compute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class CostFormulas(NamedTuple):
    """The two formulas of the dynamic programme; their numbers may be arrays, which broadcast.

    ``stage(seconds, weights, traffic, replicas, bandwidth, shared_by)`` returns the seconds of a stage for
    one microbatch; ``traffic`` are the bytes that cross the cuts at its ends, and ``shared_by`` is the number
    of workers of a replica that share the sending of its gradients.

    ``cut(bytes_in, bytes_out, replicas, bandwidth)`` returns the seconds of the links of a stage, which is
    not the first, for one microbatch; ``bytes_in`` cross the cut before the stage, ``bytes_out`` the cut
    after it, 0 where nothing follows.
    """

    stage: Callable[[Any, Any, Any, Any, float, int], Any]
    cut: Callable[[Any, float, Any, float], Any]


PAPER = CostFormulas(
    stage=lambda seconds, weights, _, replicas, bandwidth, __: (
        np.maximum(seconds, 2 * (replicas - 1) * weights / bandwidth) / replicas
    ),
    # Each cut counts once, as the input of the stage after it.
    cut=lambda bytes_in, _, replicas, bandwidth: 2 * bytes_in / bandwidth,
)
"""The formulas of the paper, in which workers do not share the sending of gradients."""

REFERENCE = CostFormulas(
    stage=lambda seconds, weights, _, replicas, bandwidth, shared_by: (
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

LINKS = CostFormulas(
    stage=lambda seconds, weights, traffic, replicas, bandwidth, _: (
        np.maximum(seconds, (traffic + 2 * (replicas - 1) * weights / replicas) / bandwidth) / replicas
    ),
    cut=lambda bytes_in, bytes_out, replicas, bandwidth: 0.0,
)
"""The formulas of links that send and receive at once.

In a hierarchy the links of a worker carry all that leaves its machine too, and a machine has one link of the
next level for all of its workers.
"""

MEMORY = CostFormulas(
    stage=lambda worker_bytes, *_: worker_bytes,
    cut=lambda bytes_in, bytes_out, replicas, bandwidth: 0.0,
)
"""Formulas with which the programme minimises the bytes of the fullest worker instead of seconds.

Replicas do not make these bytes fewer, and a cut adds none.
"""

FORMULAS = {"paper": PAPER, "reference": REFERENCE, "links": LINKS}
"""The formulas by their names for ``mpp partition --cost``."""
