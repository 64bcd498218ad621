"""Replays of candidates, with the cut of each that makes its step shortest where layouts are searched."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import repeat
from operator import mul
from statistics import fmean
from typing import NamedTuple

from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.optimizers import model_state
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout import climb
from megatron_pp_ext.planner.layout.cut import Cut, bounds, even
from megatron_pp_ext.planner.layout.rows import ModelStages, StageSeconds, fewest
from megatron_pp_ext.planner.search.candidate import Candidate, UnitWork, Variants, of_option
from megatron_pp_ext.planner.search.lower_bounds import (
    MeanRank,
    ModelSums,
    least_memory,
    least_memory_sharing,
    least_of_rank,
    mean_rank,
)
from megatron_pp_ext.planner.step.estimate import (
    Estimate,
    RankMemory,
    StepModel,
    memory_beside,
)
from megatron_pp_ext.planner.step.programs import Prepared, short_program, whole_program
from megatron_pp_ext.planner.step.workload import Workload, model_on, stages_of_ranks
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import CriticalPath


class Workloads:
    """The workloads of candidates for the model of ``job`` on ``system``."""

    def __init__(self, job: Job, system: System) -> None:
        self._system = system
        self._described = lru_cache(maxsize=8)(partial(Candidate.described, job=job))
        self._models: dict[tuple[object, ...], ModelParts] = {}
        self._sums: dict[tuple[object, ...], ModelSums] = {}
        self._seconds: dict[tuple[object, ...], StageSeconds] = {}
        self._stages: dict[tuple[object, ...], ModelStages] = {}
        self._units: dict[tuple[object, ...], UnitWork | None] = {}
        self._starts: dict[tuple[object, ...], Cut | None] = {}

    def work(
        self, candidate: Candidate, placement: Placement | None = None, layers: tuple[int, ...] | None = None
    ) -> Workload:
        """Return its stages with their costs.

        They are placed by ``placement`` and have ``layers`` layers each, or as in the candidate.
        """
        job = self._described(candidate)
        model = self._model(candidate, job)
        placed = placement or candidate.placement
        return Workload(job, self._system, placed, candidate.data, layers, model)

    def mean(self, candidate: Candidate, placement: Placement) -> MeanRank:
        """Return the average of its ranks, with even stages where these make a difference."""
        job = self._described(_without_layout(candidate))
        sums, least = self._sums_of(candidate, job), fewest(job, placement)
        cut = even(len(sums.model.layers), least)
        sizes = candidate.data, cut, sums.model
        units = self.units(candidate, job)
        return mean_rank(Workload(job, self._system, placement, *sizes), sums, least, units)

    def units(self, candidate: Candidate, job: Job | None = None) -> UnitWork | None:
        """Return what the units of its microbatches take at least, None where they stay whole."""
        option = candidate.planned
        if option is None:
            return None
        key = *_costs_of_a_layer(candidate), option
        if key not in self._units:
            whole = job or self._described(candidate)
            self._units[key] = of_option(option).least(candidate, whole, self._seconds_of)
        return self._units[key]

    def _seconds_of(self, job: Job) -> float:
        return ModelSums(model_on(job, self._system)).seconds

    def stages(self, candidate: Candidate, placement: Placement) -> ModelStages:
        """Return the stages that its model can be cut into; candidates with the same ones share them."""
        alike = *_costs_of_a_layer(candidate), candidate.recompute, placement.splits_head
        key = *alike, placement
        if key not in self._stages:
            job = self._described(_without_layout(candidate))
            if alike not in self._seconds:
                model = self._model(candidate, job)
                self._seconds[alike] = StageSeconds(job, model, placement.splits_head)
            self._stages[key] = ModelStages(job, self._seconds[alike], placement)
        return self._stages[key]

    def once(self, key: tuple[object, ...], find: Callable[[], Cut | None]) -> Cut | None:
        """Return the result of ``find`` for candidates that share ``key``: that of the first of them."""
        if key not in self._starts:
            self._starts[key] = find()
        return self._starts[key]

    def _model(self, candidate: Candidate, job: Job) -> ModelParts:
        """Return the parts of its model; candidates that share the costs of a layer share a model."""
        key = _costs_of_a_layer(candidate)
        if key not in self._models:
            self._models[key] = model_on(job, self._system)
        return self._models[key]

    def _sums_of(self, candidate: Candidate, job: Job) -> ModelSums:
        key = _costs_of_a_layer(candidate)
        if key not in self._sums:
            self._sums[key] = ModelSums(self._model(candidate, job))
        return self._sums[key]


def _without_layout(candidate: Candidate) -> Candidate:
    return candidate if candidate.layout is None else replace(candidate, layout=None)


def _costs_of_a_layer(candidate: Candidate) -> tuple[object, ...]:
    """Return all of a candidate that the costs of a layer follow from."""
    return (
        candidate.tensor,
        candidate.context,
        candidate.expert,
        candidate.expert_tensor,
        candidate.micro_batch,
        candidate.recompute.modules,
    )


def step_of(candidate: Candidate, work: Workload, margin: float, order: Prepared | None = None) -> StepModel:
    """Return the model of the step with the stages of ``work``, in the candidate's order or another."""
    return StepModel(
        work, order or order_of(candidate, work=work), candidate.schedule, candidate.microbatches, margin
    )


def order_of(candidate: Candidate, most: int | None = None, work: Workload | None = None) -> Prepared:
    """Return the candidate's schedule, for ``most`` microbatches at most.

    One that depends on what stages take is planned by the costs of ``work``.
    """
    count = min(candidate.microbatches, most or candidate.microbatches)
    options = candidate.options
    if work is not None and candidate.planned is not None:
        options = tuple(of_option(option).planned(option, work) for option in options)
    sizes = candidate.pipeline, count, candidate.chunks, candidate.splits_head, options
    program = whole_program if most is None else short_program
    return program(candidate.schedule, *sizes)


_IN_FLIGHT = 0.5
"""The part of the units in flight, as many as a schedule's microbatches, that a plan keeps at least."""

_PLANNED_MOVES = 2
"""The moves between stages whose memory is looked at where each has its order planned anew."""


@dataclass(frozen=True, slots=True)
class CandidateCuts:
    """The cuts of ``candidate`` into ``stages``, on ranks of ``limit`` bytes.  Each is looked at once.

    ``resident`` is the part of its activations that each rank keeps on the device, all where it is empty.
    """

    candidate: Candidate
    stages: ModelStages
    workloads: Workloads
    margin: float
    limit: float
    resident: tuple[float, ...] = ()
    _works: dict[Cut, Workload] = field(default_factory=dict)
    _memories: dict[Cut, tuple[RankMemory, ...]] = field(default_factory=dict)
    _ranks: dict[tuple[object, ...], RankMemory] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """Whether the order is planned by the costs of each cut."""
        return self.candidate.planned is not None

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
        """Return a lower bound on the mean memory of the ranks, where stages have equally many layers."""
        candidate, placement = self.candidate, self.stages.placement
        mean = self.workloads.mean(candidate, placement)
        shared, order = mean.work.head, order_of(candidate.unplanned, 2 * candidate.pipeline, mean.work)
        peaks = order.in_flight.peaks(mean.work.parts, shared.activation if shared else 0.0)
        if self.is_planned:
            # Every rank keeps a whole microbatch, and units of others in the place of microbatches.
            share = _IN_FLIGHT / mean.work.units
            peaks = tuple(
                rank.after_forward + share * max(0.0, peak - rank.after_forward)
                for peak, rank in zip(peaks, mean.work.by_rank, strict=True)
            )
        whole = fmean(map(mul, peaks, self.resident or repeat(1.0)))
        return mean.memory(candidate.microbatches, self.margin, whole * order.timer.schedule.share)

    def memory(self, cut: Cut) -> tuple[RankMemory, ...]:
        """Return the memory of the ranks for a few microbatches."""
        if cut not in self._memories:
            self._memories[cut] = tuple(self._of_ranks(self.work(cut)))
        return self._memories[cut]

    def _of_ranks(self, work: Workload) -> Iterator[RankMemory]:
        """Yield ``short_memory`` rank by rank; cuts that give a rank the same stages share one entry."""
        if self.is_planned:
            # A plan takes longer than what is timed with it, so that it is the one of the step.
            yield from step_of(self.candidate, work, self.margin).memory()
            return
        order, kinds = order_of(self.candidate, 2 * self.candidate.pipeline, work), work.model.kinds
        layers = [kinds[first:end] for _, first, end in bounds(tuple(work.layers))]
        logits = work.head.activation if work.head else 0.0
        splits = order.timer.schedule.splits_backward
        for rank, stages in enumerate(stages_of_ranks(work.placement)):
            key = rank, work.job.pipeline.pipeline_model_parallel_layout, *(layers[stage] for stage in stages)
            if key not in self._ranks:
                parts = [work.parts[stage] for stage in stages]
                state = model_state(work.job, work.summed(parts), work.sharing)
                activations = order.in_flight.peak(rank, parts, logits) * (
                    self.resident[rank] if self.resident else 1.0
                )
                peaks = activations, order.peak_messages[rank]
                self._ranks[key] = memory_beside(
                    work, state, work.loss_bytes(rank), *peaks, self.margin, splits=splits
                )
            yield self._ranks[key]

    def least(self, cut: Cut) -> RankMemory:
        """Return a lower bound on the fullest rank's memory."""
        if self.is_planned or (self.candidate.splits_head and not self.resident):
            return least_in_order(self.candidate, self.work(cut), self.margin)
        return max(self.memory(cut), key=lambda rank: rank.total)

    def fitted(self) -> Cut | None:
        """Return the first cut to try: even, except where memory demands otherwise."""
        stages, limit = self.stages, self.limit
        if not self.is_planned:
            return climb.fitted(stages, stages.start, self._totals, limit)
        # Lower bounds come before orders are planned.  The schedules of a placement have the same ones.
        key = replace(self.candidate, schedule="", layout=None), stages.placement, limit
        fitting = partial(climb.fitted, stages, stages.start, self._least_totals, limit)
        start = self.workloads.once(key, fitting)
        return start and climb.fitted(stages, start, self._totals, limit, _PLANNED_MOVES)

    def shortened(self, cut: Cut) -> Cut:
        """Return the cut with the shortest pipeline that moves reach from ``cut``."""
        timer = order_of(self.candidate, work=self.work(cut)).timer

        def replay(cut: Cut) -> CriticalPath:
            return timer.critical_path(self.work(cut).costs)

        def fits(cut: Cut) -> bool:
            return max(self._totals(cut)) <= self.limit

        return climb.shortened(self.stages, cut, self.candidate.microbatches, replay, fits).cut

    def _least_totals(self, cut: Cut) -> list[float]:
        """Return lower bounds of ``_totals``, whatever the order."""
        work, count = self.work(cut), self.candidate.microbatches
        ranks = range(self.candidate.pipeline)
        return [least_of_rank(work, rank, count, self.margin).total for rank in ranks]

    def _totals(self, cut: Cut) -> list[float]:
        """Return the bytes of each rank under ``cut``; infinite where Megatron cannot build it."""
        if not self.stages.can_be(cut):
            return [float("inf")] * self.candidate.pipeline
        return [rank.total for rank in self.memory(cut)]


def short_memory(candidate: Candidate, work: Workload, margin: float) -> tuple[RankMemory, ...]:
    """Return the memory of the ranks for a few microbatches.

    More of them need no less memory, and a short order is built sooner.
    """
    order = order_of(candidate, 2 * candidate.pipeline, work)
    return step_of(candidate, work, margin, order).memory()


def least_in_order(candidate: Candidate, work: Workload, margin: float) -> RankMemory:
    """Return a lower bound on the fullest rank's memory, without building the whole schedule."""
    if candidate.planned is not None:  # list scheduling may keep less of more microbatches
        return least_memory(work, candidate.microbatches, margin)
    if candidate.splits_head:
        return least_memory_sharing(work, candidate.schedule, candidate.microbatches, margin)
    return max(short_memory(candidate, work, margin), key=lambda rank: rank.total)


IMPROVED = 0.1
"""The part of a step by which another layout is taken to shorten it at most: longer ones are not improved."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.estimate.step_seconds

    @property
    def bytes(self) -> float:
        """The bytes of the fullest rank."""
        return self.estimate.fullest.total


class Timed(NamedTuple):
    """A candidate with its step, and what its fullest rank needs at least."""

    candidate: Candidate
    step: StepModel
    least: RankMemory

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.step.pace.step_seconds


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
        if least.total > limit or (cuts.is_planned and start is None):
            return least
        timed = self._cut(cuts, start or cuts.stages.start)
        if start and timed.least.total <= headroom(timed.seconds * (1 - IMPROVED)):
            other = self._cut(cuts, cuts.shortened(start))
            if other.seconds < timed.seconds:
                evaluated = estimated(other, limit, headroom)
                if isinstance(evaluated, Evaluated):
                    return evaluated
        return estimated(timed, limit, headroom)

    def _cut(self, cuts: CandidateCuts, cut: Cut) -> Timed:
        return self.timed(cuts.laid_out(cut), cuts.work(cut), cuts.least(cut))

    def timed(self, candidate: Candidate, work: Workload, least: RankMemory) -> Timed:
        """Return the candidate with its step."""
        return Timed(candidate, step_of(candidate, work, self.margin), least)

    def _estimated(
        self, timed: Timed, limit: float, headroom: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or the other results of ``replayed``.

        The messages of a whole order take longer to count than its seconds, and are counted last.
        """
        candidate = timed.candidate
        if timed.least.total > headroom(timed.seconds):
            return None
        estimated = timed.step.estimate()
        return Evaluated(candidate, estimated) if estimated.fullest.total <= limit else estimated.fullest
