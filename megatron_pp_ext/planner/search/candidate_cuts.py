"""The cuts of one candidate's layers into its stages: what each takes and needs, and which are tried."""

from dataclasses import dataclass, field, replace
from statistics import fmean

from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.fit import fitted
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.layout.shorten import shorten
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.lower_bounds import least_memory_sharing
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import RankMemory, memory
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.timing import CriticalPath


@dataclass(frozen=True, slots=True)
class CandidateCuts:
    """The cuts of ``candidate`` into ``stages``, on ranks of ``limit`` bytes.  Each is looked at once."""

    candidate: Candidate
    stages: ModelStages
    workloads: Workloads
    margin: float
    limit: float
    _works: dict[Cut, Workload] = field(default_factory=dict)
    _memories: dict[Cut, tuple[RankMemory, ...]] = field(default_factory=dict)

    def work(self, cut: Cut) -> Workload:
        """Return the stages of ``cut``."""
        if cut not in self._works:
            candidate = replace(self.candidate, layout=self.stages.layout_for(cut))
            self._works[cut] = self.workloads.work(candidate, layers=self.stages.layers_of(cut))
        return self._works[cut]

    def laid_out(self, cut: Cut) -> Candidate:
        """Return the candidate with the layout of ``cut``."""
        return replace(self.candidate, layout=self.stages.layout(cut))

    def mean(self) -> RankMemory:
        """Return what a rank needs on average at least, where stages have equally many layers."""
        one, placement = self.candidate, self.stages.placement
        mean = self.workloads.mean(one, placement)
        shared, order = mean.work.vocabulary, order_of(one, 2 * one.pipeline)
        kept = order.in_flight.peaks(mean.work.parts, shared.activation if shared else 0.0)
        return mean.memory(one.microbatches, self.margin, fmean(kept))

    def memory(self, cut: Cut) -> tuple[RankMemory, ...]:
        """Return what the ranks need for a few microbatches."""
        if cut not in self._memories:
            self._memories[cut] = short_memory(self.candidate, self.work(cut), self.margin)
        return self._memories[cut]

    def least(self, cut: Cut) -> RankMemory:
        """Return what the fullest rank needs at least."""
        if self.candidate.shares_vocabulary:
            return least_in_order(self.candidate, self.work(cut), self.margin)
        return max(self.memory(cut), key=lambda rank: rank.total)

    def fitted(self) -> Cut | None:
        """Return the cut that is tried first: even, but for what keeps it within the memory."""
        stages = self.stages
        return fitted(stages.start, stages.placement, stages.seconds, self._totals, self.limit, stages.least)

    def shortened(self, cut: Cut) -> Cut:
        """Return the cut whose pipeline is shortest among those that moves lead to from ``cut``."""
        timer, stages = order_of(self.candidate).timer, self.stages

        def replay(cut: Cut) -> CriticalPath:
            return timer.critical_path(self.work(cut).costs)

        def fits(cut: Cut) -> bool:
            return max(self._totals(cut)) <= self.limit

        microbatches = self.candidate.microbatches
        return shorten(cut, stages.placement, microbatches, stages.seconds, replay, fits, stages.least).cut

    def _totals(self, cut: Cut) -> list[float]:
        """Return the bytes of each rank under ``cut``; infinite where Megatron cannot build it."""
        if not self.stages.can_be(cut):
            return [float("inf")] * self.candidate.pipeline
        return [rank.total for rank in self.memory(cut)]


def short_memory(candidate: Candidate, work: Workload, margin: float) -> tuple[RankMemory, ...]:
    """Return what the ranks need for a few microbatches.

    More of them need no less memory, and a short order is built sooner.
    """
    order = order_of(candidate, 2 * candidate.pipeline)
    return memory(work, order, candidate.schedule, candidate.microbatches, margin)


def least_in_order(candidate: Candidate, work: Workload, margin: float) -> RankMemory:
    """Return what the fullest rank needs at least, without building the whole schedule."""
    if candidate.shares_vocabulary:
        return least_memory_sharing(work, candidate.schedule, candidate.microbatches, margin)
    return max(short_memory(candidate, work, margin), key=lambda rank: rank.total)
