"""Replays of candidates, with the layout that makes the step of each shortest where layouts are searched."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_pp_ext.planner.layout.balance import even
from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.fit import fitted
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.layout.shorten import shorten
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.lower_bounds import least_memory_sharing, mean_memory
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import Estimate, RankMemory, estimate, memory
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.timing import CriticalPath


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays candidates; where ``is_uneven``, layers are spread over the stages as suits each best."""

    workloads: Workloads
    margin: float
    is_uneven: bool = False

    def replayed(
        self, candidate: Candidate, limit: float, is_promising: Callable[[Estimate], bool]
    ) -> Evaluated | RankMemory:
        """Return the candidate with its estimate, or what its fullest rank needs if that is above ``limit``.

        Only where ``is_promising`` says so of the layout that it is tried with first, others are tried.
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
        work = self.workloads.work(candidate)
        fullest = self._least(candidate, work)
        if fullest.total > limit:
            return fullest
        found = self._estimate(candidate, work)
        if found.fullest.total > limit:
            return found.fullest
        if stages and cut and is_promising(found):
            other = self._shortened(candidate, stages, cut, limit)
            better = self._estimate(other, self.workloads.work(other))
            if better.step_seconds < found.step_seconds and better.fullest.total <= limit:
                return Evaluated(other, better)
        return Evaluated(candidate, found)

    def _estimate(self, candidate: Candidate, work: Workload) -> Estimate:
        order = order_of(candidate)
        return estimate(work, order, candidate.schedule, candidate.microbatches, self.margin)

    def _least(self, candidate: Candidate, work: Workload) -> RankMemory:
        """Return what the fullest rank needs at least, without building the whole schedule."""
        if candidate.shares_vocabulary:
            return least_memory_sharing(work, candidate.schedule, candidate.microbatches, self.margin)
        return max(self._short(candidate, work), key=lambda rank: rank.total)

    def _mean(self, candidate: Candidate, stages: ModelStages) -> RankMemory:
        """Return what a rank needs on average at least, where stages have equally many layers."""
        work = self.workloads.work(candidate, layers=even(stages.layers, stages.least))
        order = order_of(candidate, 2 * candidate.pipeline)
        return mean_memory(work, candidate.microbatches, self.margin, order)

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
