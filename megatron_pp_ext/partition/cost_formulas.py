"""Seconds that a stage and a cut keep a worker or a link busy, for one microbatch.

The paper's formulas (PipeDream, SOSP 2019, section 3.1) and those that its authors' public optimizer
computes differ, so both are offered.  With T the seconds of the stage on one replica, W its bytes of
weights, r its replicas, a the bytes that cross a cut and B the bandwidth in bytes a second:

               stage                            cut
    paper      max(T, 2 (r-1) W / B) / r        2 a / B, between two stages
    reference  (T + 4 (r-1) W / (B r)) / r      2 a / (B r), on both sides of every stage but the first

The paper lets gradients travel while the next microbatch computes, the optimizer lets the worker wait.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Numbers = Any
"""A number or a numpy array of them."""


class Cost(ABC):
    """What the dynamic programme adds up; numbers may be arrays, which broadcast."""

    @abstractmethod
    def stage(
        self, seconds: Numbers, weights: Numbers, replicas: Numbers, bandwidth: float, shared_by: int = 1
    ) -> Numbers:
        """Seconds a microbatch takes a stage.

        ``shared_by``: the workers of a replica, where they share in sending its gradients.
        """

    @abstractmethod
    def cut(self, bytes_in: Numbers, bytes_out: float, replicas: Numbers, bandwidth: float) -> Numbers:
        """Seconds a microbatch takes the links of a stage that is not the first.

        ``bytes_in`` cross the cut before it, ``bytes_out`` the cut behind it, 0 where nothing follows.
        """


class Paper(Cost):
    """The formulas of the paper."""

    def stage(
        self, seconds: Numbers, weights: Numbers, replicas: Numbers, bandwidth: float, shared_by: int = 1
    ) -> Numbers:
        """See the module's docstring; the paper knows no sharing."""
        return np.maximum(seconds, 2 * (replicas - 1) * weights / bandwidth) / replicas

    def cut(self, bytes_in: Numbers, bytes_out: float, replicas: Numbers, bandwidth: float) -> Numbers:
        """See the module's docstring: each cut counts once, as the input of the stage behind it."""
        return 2 * bytes_in / bandwidth


class Reference(Cost):
    """The formulas of github.com/msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py."""

    def stage(
        self, seconds: Numbers, weights: Numbers, replicas: Numbers, bandwidth: float, shared_by: int = 1
    ) -> Numbers:
        """See the module's docstring.

        In a hierarchy the optimizer divides the gradients among the workers of a machine, though only
        for a stage that begins with the block's first layer.
        """
        return (seconds + 4 * (replicas - 1) * weights / (bandwidth * replicas) / shared_by) / replicas

    def cut(self, bytes_in: Numbers, bytes_out: float, replicas: Numbers, bandwidth: float) -> Numbers:
        """See the module's docstring."""
        return 2 * np.maximum(bytes_in, bytes_out) / (bandwidth * replicas)


class Footprint(Cost):
    """Makes the programme minimise the fullest worker's bytes: they neither shrink nor travel."""

    def stage(
        self, seconds: Numbers, weights: Numbers, replicas: Numbers, bandwidth: float, shared_by: int = 1
    ) -> Numbers:
        """What the stage's worker has."""
        return seconds

    def cut(self, bytes_in: Numbers, bytes_out: float, replicas: Numbers, bandwidth: float) -> Numbers:
        """Nothing."""
        return 0.0


COSTS: dict[str, Cost] = {"paper": Paper(), "reference": Reference()}
"""What ``mpp partition --cost`` accepts."""
