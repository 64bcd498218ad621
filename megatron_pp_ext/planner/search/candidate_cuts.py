"""The cuts of one candidate's layers into its stages: what each takes and needs, and which are tried."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import mul
from statistics import fmean

from megatron_pp_ext.costs.state import model_state
from megatron_pp_ext.planner.layout import climb
from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.lower_bounds import least_memory_sharing
from megatron_pp_ext.planner.search.workloads import Workloads, order_of, step_of
from megatron_pp_ext.planner.step.estimate import RankMemory, memory_beside
from megatron_pp_ext.planner.step.workload import Workload, stages_of_ranks
from megatron_pp_ext.schedule.timing import CriticalPath


@dataclass(frozen=True, slots=True)
class CandidateCuts:
    """The cuts of ``candidate`` into ``stages``, on ranks of ``limit`` bytes.  Each is looked at once.

    ``left`` is the part of its activations that each rank keeps on the device, all where it is empty.
    """

    candidate: Candidate
    stages: ModelStages
    workloads: Workloads
    margin: float
    limit: float
    left: tuple[float, ...] = ()
    _works: dict[Cut, Workload] = field(default_factory=dict)
    _memories: dict[Cut, tuple[RankMemory, ...]] = field(default_factory=dict)
    _ranks: dict[tuple[object, ...], RankMemory] = field(default_factory=dict)

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
        shared, order = mean.work.head, order_of(one, 2 * one.pipeline)
        kept = order.in_flight.peaks(mean.work.parts, shared.activation if shared else 0.0)
        whole = fmean(map(mul, kept, self.left or repeat(1.0)))
        return mean.memory(one.microbatches, self.margin, whole * order.timer.schedule.share)

    def memory(self, cut: Cut) -> tuple[RankMemory, ...]:
        """Return what the ranks need for a few microbatches."""
        if cut not in self._memories:
            self._memories[cut] = tuple(self._of_ranks(self.work(cut)))
        return self._memories[cut]

    def _of_ranks(self, work: Workload) -> Iterator[RankMemory]:
        """Yield what ``short_memory`` returns; many cuts give a rank the same stages, counted once."""
        order, kinds = order_of(self.candidate, 2 * self.candidate.pipeline), work.model.kinds
        if order.timer.schedule.units:
            yield from step_of(self.candidate, work, self.margin, order).memory()
            return
        layers = [kinds[first:end] for _, first, end in bounds(tuple(work.layers))]
        kept = work.head.activation if work.head else 0.0
        splits = order.timer.schedule.splits_backward
        for rank, stages in enumerate(stages_of_ranks(work.placement)):
            key = rank, work.job.pipeline.pipeline_model_parallel_layout, *(layers[stage] for stage in stages)
            if key not in self._ranks:
                own = [work.parts[stage] for stage in stages]
                state = model_state(work.job, work.summed(own), work.sharing)
                activations = order.in_flight.peak(rank, own, kept) * (self.left[rank] if self.left else 1.0)
                peaks = activations, order.peak_messages[rank]
                self._ranks[key] = memory_beside(
                    work, state, work.loss_bytes(rank), *peaks, self.margin, splits=splits
                )
            yield self._ranks[key]

    def least(self, cut: Cut) -> RankMemory:
        """Return what the fullest rank needs at least."""
        if self.candidate.splits_head and not self.left:
            return least_in_order(self.candidate, self.work(cut), self.margin)
        return max(self.memory(cut), key=lambda rank: rank.total)

    def fitted(self) -> Cut | None:
        """Return the cut that is tried first: even, but for what keeps it within the memory."""
        return climb.fitted(self.stages, self.stages.start, self._totals, self.limit)

    def shortened(self, cut: Cut) -> Cut:
        """Return the cut whose pipeline is shortest among those that moves lead to from ``cut``."""
        timer = order_of(self.candidate).timer

        def replay(cut: Cut) -> CriticalPath:
            return timer.critical_path(self.work(cut).costs)

        def fits(cut: Cut) -> bool:
            return max(self._totals(cut)) <= self.limit

        return climb.shortened(self.stages, cut, self.candidate.microbatches, replay, fits).cut

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
    return step_of(candidate, work, margin, order).memory()


def least_in_order(candidate: Candidate, work: Workload, margin: float) -> RankMemory:
    """Return what the fullest rank needs at least, without building the whole schedule."""
    if candidate.splits_head:
        return least_memory_sharing(work, candidate.schedule, candidate.microbatches, margin)
    return max(short_memory(candidate, work, margin), key=lambda rank: rank.total)
