"""The log of a search: its begin and sizes, its progress now and then, and the time that it took.

The clock is read for these lines alone: nothing that a search finds depends on it.
"""

import logging
import math
import time
from collections.abc import Sequence

from megatron_pp_ext.compiler.search.problem import Problem

_LOG = logging.getLogger(__name__)

_PAUSE_SECONDS = 10.0
"""The least time between two lines about how far a search is."""


class ProgressLog:
    """The lines of one search of ``problem`` within ``limits``; no makespan is below ``bound``."""

    def __init__(self, problem: Problem, limits: Sequence[float], bound: float) -> None:
        placement = problem.placement
        least, most = min(limits), max(limits)
        limit = f"limit {most:.4g}" if least == most else f"limits from {least:.4g} to {most:.4g}"
        self._what = (
            f"a schedule for p = {placement.ranks}, m = {problem.microbatches}, {placement.shape} placement, "
            f"{limit}"
        )
        self._bound = bound
        self._shortest = math.inf
        self._begin = self._latest = time.monotonic()
        _LOG.info(f"compiling {self._what}")

    def found(self, makespan: float) -> None:
        """Note one result, and log how far the search is if it has not for a while."""
        self._shortest = min(self._shortest, makespan)
        now = time.monotonic()
        if now - self._latest >= _PAUSE_SECONDS:
            self._latest = now
            _LOG.info(f"compiling {self._what}: so far {self._above()} after {now - self._begin:.0f} s")

    def end(self) -> None:
        """Log how good the best result is and how long the search took."""
        seconds = time.monotonic() - self._begin
        _LOG.info(f"compiled {self._what}, in {seconds:.1f} s, {self._above()}")

    def _above(self) -> str:
        if self._shortest == math.inf:
            return "none found"
        return f"{max(0.0, self._shortest / self._bound - 1):.1%} above its lower bound"
