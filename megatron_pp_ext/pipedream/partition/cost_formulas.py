"""Formulas for the seconds between microbatches that a stage allows, and for the microbatches in flight.

With T the seconds of the stage on one replica, W its bytes of weights, r its replicas, a the bytes that cross
the cut before it and b those after it, and B the bandwidth of a worker's link in bytes a second:

    links      max(T, (a + b + 2 (r-1) W / r) / B) / r
    paper      max(max(T, 2 (r-1) W / B) / r, 2 a / B)
    reference  max((T + 4 (r-1) W / (B r)) / r, 2 max(a, b) / (B r))

``paper`` is PipeDream's own (SOSP 2019, section 3.1), and ``reference`` that of its authors' public
optimizer.  A formula sees one stage at a time, so the seconds of a pipeline are its slowest stage's, and the
dynamic programme stays exact.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


def versions(downstream: Any) -> Any:
    """Return the weight versions and microbatches in flight of a replica of a stage.

    ``downstream`` is the number of workers after the stage, divided by its replicas.  It is an array of
    fractions such as 5/3; the small number subtracted keeps a whole one from being rounded up.

    A stage has as many microbatches in flight as its warm-up is deep: with R workers from this stage to the
    end and r replicas, ceil(R / r) on each replica (PipeDream, SOSP 2019, section 3.2; NOAM is that of the
    input stage).  Each microbatch keeps its activations, and the version of the weights that its forward has
    used: n - s versions on stage s of n without replicas.
    """
    return np.ceil(1 + np.asarray(downstream) - 1e-9)


def in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches in flight on a replica of every stage, given the replicas of all stages."""
    return tuple(math.ceil(sum(replicas[stage:]) / count) for stage, count in enumerate(replicas))


class StageLoad(NamedTuple):
    """The work of a stage on one microbatch; numbers may be arrays, which broadcast.

    ``seconds`` are of one replica, ``weights`` its bytes.  ``bytes_in`` cross the cut before the stage
    and ``bytes_out`` the one after it, forward as activations and backward as gradients.  A replica is a
    machine of ``machines`` parts of the level below, 1 if it is a single worker.  ``is_first`` means that the
    pipeline of this level begins with the stage, so that the cut before it is one of a level above.
    """

    seconds: Any
    weights: Any
    bytes_in: Any
    bytes_out: Any
    replicas: Any
    bandwidth: float
    machines: int
    is_first: bool


Formula = Callable[[StageLoad], Any]
"""Returns the seconds between microbatches that a stage allows."""


def links(stage: StageLoad) -> Any:
    """Return the seconds on full-duplex links, which cuts and all-reduce share while the worker computes.

    Replicas alternate, so each does one microbatch of every r.  In that time its link sends the output (b)
    and the gradient of its input (a), and its part of a ring all-reduce; it receives as much.

    Levels are a tree of switches: a worker has one link to the switch of its machine, and a machine one to
    the switch above.  What crosses a cut between machines loads their links and those of the workers at both
    ends.  Gradients are reduced within a machine first, and then between machines; the second loads the links
    of the machines only, which leaves out 2 (m-1) W / (m r) bytes of each worker for m machines.
    """
    all_reduce = 2 * (stage.replicas - 1) * stage.weights / stage.replicas
    sent = (stage.bytes_in + stage.bytes_out + all_reduce) / stage.bandwidth
    return np.maximum(stage.seconds, sent) / stage.replicas


def paper(stage: StageLoad) -> Any:
    """Return the seconds of the paper: a cut is a stage of its own, whose link replicas do not share out.

    Gradients travel while the next microbatch computes.  Each cut counts once, before the stage after it.
    """
    gradients = 2 * (stage.replicas - 1) * stage.weights / stage.bandwidth
    cut = 0.0 if stage.is_first else 2 * stage.bytes_in / stage.bandwidth
    return np.maximum(np.maximum(stage.seconds, gradients) / stage.replicas, cut)


def reference(stage: StageLoad) -> Any:
    """Return the seconds of github.com/msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py.

    The worker waits for the gradients.  Both cuts of a stage count, but none of the first stage.  The parts
    of a machine share the sending of gradients, though only in the first stage.
    docs/without-a-flush.md lists where the answers are not the optimizer's.
    """
    shared_by = stage.machines if stage.is_first else 1
    gradients = 4 * (stage.replicas - 1) * stage.weights / stage.replicas / shared_by / stage.bandwidth
    cuts = 0.0 if stage.is_first else 2 * np.maximum(stage.bytes_in, stage.bytes_out) / stage.bandwidth
    return np.maximum(stage.seconds + gradients, cuts) / stage.replicas


def worker_bytes(stage: StageLoad) -> Any:
    """Return the bytes of the fullest worker, which a ``MemoryWorker`` has in the place of seconds.

    Replicas do not make these bytes fewer, and a cut adds none.
    """
    return stage.seconds


FORMULAS: dict[str, Formula] = {"links": links, "paper": paper, "reference": reference}
"""The formulas by their names for ``mpp partition --cost``.

The default is ``links``, whose cuts a simulation prefers (benchmarks/results/partition_costs.md).
"""
