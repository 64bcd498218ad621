"""Replays of candidates, with the layout that makes the step of each shortest where layouts are searched."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.fit import fitted
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.layout.shorten import shorten
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.lower_bounds import least_memory_sharing
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import Estimate, Pace, RankMemory, estimate, memory, pace
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.timing import CriticalPath

IMPROVED = 0.1
"""The part of a step by which another layout is taken to shorten it at most: longer ones are not improved."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate


class _Timed(NamedTuple):
    """A candidate with its stages and the seconds of its step."""

    candidate: Candidate
    work: Workload
    pace: Pace


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays candidates; where ``is_uneven``, layers are spread over the stages as suits each best."""

    workloads: Workloads
    margin: float
    is_uneven: bool = False

    def replayed(
        self, candidate: Candidate, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or what its fullest rank needs if that is above ``limit``.

        ``room`` returns the bytes in which a step of so many seconds would be worth having.  None stands for
        a candidate that was timed and needs more.  Other layouts than the one that it is tried with first
        are tried only where a step that is shorter by ``IMPROVED`` would be worth having.
        """
        searches = self.is_uneven and candidate.pipeline > 1
        stages = self.workloads.stages(candidate, candidate.placement) if searches else None
        if stages is not None:
            # Cuts differ little in what all ranks need together, and most candidates end here.
            mean = self._mean(candidate, stages)
            if mean.total > limit:
                return mean
        cut = stages and self._fitted(candidate, stages, limit)
        if stages is not None:
            candidate = replace(candidate, layout=stages.layout(cut or stages.start))
        least = self._least(candidate, self.workloads.work(candidate))
        if least.total > limit:
            return least
        timed = self._timed(candidate)
        if stages and cut and least.total <= room(timed.pace.step_seconds * (1 - IMPROVED)):
            other = self._timed(self._shortened(candidate, stages, cut, limit))
            if other.pace.step_seconds < timed.pace.step_seconds:
                found = self._estimated(other, limit, room)
                if isinstance(found, Evaluated):
                    return found
        return self._estimated(timed, limit, room)

    def _estimated(
        self, timed: _Timed, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or what ``replayed`` returns instead.

        The messages of a whole order take longer to count than its seconds, and are counted last.
        """
        candidate, work = timed.candidate, timed.work
        if self._least(candidate, work).total > room(timed.pace.step_seconds):
            return None
        sizes = candidate.schedule, candidate.microbatches, self.margin
        found = estimate(work, order_of(candidate), *sizes, timed.pace)
        return Evaluated(candidate, found) if found.fullest.total <= limit else found.fullest

    def _timed(self, candidate: Candidate) -> _Timed:
        work, order = self.workloads.work(candidate), order_of(candidate)
        return _Timed(candidate, work, pace(work, order, candidate.schedule, candidate.microbatches))

    def _least(self, candidate: Candidate, work: Workload) -> RankMemory:
        """Return what the fullest rank needs at least, without building the whole schedule."""
        if candidate.shares_vocabulary:
            return least_memory_sharing(work, candidate.schedule, candidate.microbatches, self.margin)
        return max(self._short(candidate, work), key=lambda rank: rank.total)

    def _mean(self, candidate: Candidate, stages: ModelStages) -> RankMemory:
        """Return what a rank needs on average at least, where stages have equally many layers."""
        mean = self.workloads.mean(candidate, stages.placement)
        shared, order = mean.work.vocabulary, order_of(candidate, 2 * candidate.pipeline)
        kept = order.in_flight.peaks(mean.work.parts, shared.activation if shared else 0.0)
        return mean.memory(candidate.microbatches, self.margin, fmean(kept))

    def _short(self, candidate: Candidate, work: Workload) -> tuple[RankMemory, ...]:
        """Return what the ranks need for a few microbatches.

        More of them need no less memory, and a short order is built sooner.
        """
        order = order_of(candidate, 2 * candidate.pipeline)
        return memory(work, order, candidate.schedule, candidate.microbatches, self.margin)

    def _totals(self, candidate: Candidate, stages: ModelStages, cut: Cut) -> list[float]:
        """Return the bytes of each rank under ``cut``; infinite where Megatron cannot build it."""
        if not stages.can_be(cut):
            return [float("inf")] * candidate.pipeline
        candidate = replace(candidate, layout=stages.layout(cut))
        return [rank.total for rank in self._short(candidate, self.workloads.work(candidate))]

    def _fitted(self, candidate: Candidate, stages: ModelStages, limit: float) -> Cut | None:
        """Return the cut that is tried first: even, but for what keeps it within ``limit``."""
        return fitted(
            stages.start,
            stages.placement,
            stages.seconds,
            lambda cut: self._totals(candidate, stages, cut),
            limit,
            stages.least,
        )

    def _shortened(self, candidate: Candidate, stages: ModelStages, cut: Cut, limit: float) -> Candidate:
        """Return the candidate with the layout whose pipeline is shortest among those that moves lead to."""
        timer = order_of(candidate).timer

        def replay(cut: Cut) -> CriticalPath:
            return timer.critical_path(
                self.workloads.work(replace(candidate, layout=stages.layout(cut))).costs
            )

        def fits(cut: Cut) -> bool:
            return max(self._totals(candidate, stages, cut)) <= limit

        found = shorten(
            cut, stages.placement, candidate.microbatches, stages.seconds, replay, fits, stages.least
        )
        return replace(candidate, layout=stages.layout(found.cut))
