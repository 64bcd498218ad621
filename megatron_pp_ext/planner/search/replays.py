"""Replays of candidates, with the layout that makes the step of each shortest where layouts are searched.

Candidates that do not fit can be tried in the ways that features offer (``variants``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.candidate_cuts import CandidateCuts, least_in_order
from megatron_pp_ext.planner.search.variants import Variants
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import Estimate, Pace, RankMemory, estimate, pace
from megatron_pp_ext.planner.step.workload import Workload

IMPROVED = 0.1
"""The part of a step by which another layout is taken to shorten it at most: longer ones are not improved."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate


class Timed(NamedTuple):
    """A candidate with its stages, its fullest rank's least memory, and the seconds of its step."""

    candidate: Candidate
    work: Workload
    least: RankMemory
    pace: Pace


Estimating = Callable[[Timed, float, Callable[[float], float]], Evaluated | RankMemory | None]
"""Returns an estimate within a limit, as ``Replays.replayed`` does."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays candidates; where ``is_uneven``, layers are spread over the stages as suits each best.

    ``variants`` are tried for candidates that need more memory than there is.
    """

    workloads: Workloads
    margin: float
    is_uneven: bool = False
    variants: tuple[Variants, ...] = ()

    def replayed(
        self, candidate: Candidate, limit: float, headroom: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or its fullest rank's memory if that is above ``limit``.

        ``headroom`` returns the most bytes at which a step of so many seconds would be worth having.  None
        stands for a candidate that was timed and needs more.  Other layouts than the first are tried only
        where a step that is shorter by ``IMPROVED`` would be worth having.
        """
        if not self.is_uneven or candidate.pipeline == 1:
            work = self.workloads.work(candidate)
            least = least_in_order(candidate, work, self.margin)
            if least.total > limit:
                return least
            return self._estimated(self.timed(candidate, work, least), limit, headroom)
        stages = self.workloads.stages(candidate, candidate.placement)
        cuts = CandidateCuts(candidate, stages, self.workloads, self.margin, limit)
        return self.laid_out(cuts, headroom, self._estimated)

    def varied(
        self, candidate: Candidate, limit: float, headroom: Callable[[float], float]
    ) -> Evaluated | None:
        """Return the first of the ``variants`` of the candidate that fits, if any does; see ``replayed``."""
        evaluations = (variants.replayed(self, candidate, limit, headroom) for variants in self.variants)
        return next((evaluated for evaluated in evaluations if evaluated is not None), None)

    def laid_out(
        self, cuts: CandidateCuts, headroom: Callable[[float], float], estimated: Estimating
    ) -> Evaluated | RankMemory | None:
        """Return the result of ``estimated`` for the layout of ``cuts`` whose step is shortest."""
        limit = cuts.limit
        # Cuts differ little in what all ranks need together, and most candidates end here.
        mean = cuts.mean()
        if mean.total > limit:
            return mean
        start = cuts.fitted()
        least = cuts.least(start or cuts.stages.start)
        if least.total > limit:
            return least
        timed = self._cut(cuts, start or cuts.stages.start)
        if start and timed.least.total <= headroom(timed.pace.step_seconds * (1 - IMPROVED)):
            other = self._cut(cuts, cuts.shortened(start))
            if other.pace.step_seconds < timed.pace.step_seconds:
                evaluated = estimated(other, limit, headroom)
                if isinstance(evaluated, Evaluated):
                    return evaluated
        return estimated(timed, limit, headroom)

    def _cut(self, cuts: CandidateCuts, cut: Cut) -> Timed:
        return self.timed(cuts.laid_out(cut), cuts.work(cut), cuts.least(cut))

    def timed(self, candidate: Candidate, work: Workload, least: RankMemory) -> Timed:
        """Return the candidate with the seconds of its step."""
        order, sizes = order_of(candidate), (candidate.schedule, candidate.microbatches)
        return Timed(candidate, work, least, pace(work, order, *sizes))

    def _estimated(
        self, timed: Timed, limit: float, headroom: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or the other results of ``replayed``.

        The messages of a whole order take longer to count than its seconds, and are counted last.
        """
        candidate = timed.candidate
        if timed.least.total > headroom(timed.pace.step_seconds):
            return None
        sizes = candidate.schedule, candidate.microbatches, self.margin
        estimated = estimate(timed.work, order_of(candidate), *sizes, timed.pace)
        return Evaluated(candidate, estimated) if estimated.fullest.total <= limit else estimated.fullest
