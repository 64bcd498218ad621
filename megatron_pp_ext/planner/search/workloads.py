"""The workloads, stages and orders of candidates; what several candidates have in common is made once."""

from dataclasses import replace
from functools import lru_cache, partial

from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.balance import even
from megatron_pp_ext.planner.layout.model_stages import ModelStages, fewest
from megatron_pp_ext.planner.layout.stage_seconds import StageSeconds
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.lower_bounds import MeanRank, mean_rank
from megatron_pp_ext.planner.search.model_sums import ModelSums
from megatron_pp_ext.planner.step.estimate import StepModel
from megatron_pp_ext.planner.step.programs import Prepared, short_program, whole_program
from megatron_pp_ext.planner.step.workload import Workload, model_on
from megatron_pp_ext.schedule.placement import Placement


class Workloads:
    """The workloads of candidates for the model of ``job`` on ``system``."""

    def __init__(self, job: Job, system: System) -> None:
        self._system = system
        self._described = lru_cache(maxsize=8)(partial(Candidate.described, job=job))
        self._models: dict[tuple[object, ...], ModelParts] = {}
        self._sums: dict[tuple[object, ...], ModelSums] = {}
        self._seconds: dict[tuple[object, ...], StageSeconds] = {}
        self._stages: dict[tuple[object, ...], ModelStages] = {}

    def work(
        self, candidate: Candidate, placement: Placement | None = None, layers: tuple[int, ...] | None = None
    ) -> Workload:
        """Return its stages with their costs.

        They are placed by ``placement`` and have ``layers`` layers each, or as the candidate says.
        """
        job = self._described(candidate)
        model = self._model(candidate, job)
        where = placement or candidate.placement
        return Workload(job, self._system, where, candidate.data, layers, model)

    def mean(self, candidate: Candidate, placement: Placement) -> MeanRank:
        """Return what its ranks have on average, with even stages where these make a difference."""
        job = self._described(_without_layout(candidate))
        sums, least = self._sums_of(candidate, job), fewest(job, placement)
        cut = even(len(sums.model.layers), least)
        sizes = candidate.data, cut, sums.model
        return mean_rank(Workload(job, self._system, placement, *sizes), sums, least)

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

    def _model(self, one: Candidate, job: Job) -> ModelParts:
        """Return the parts of its model; candidates that share the costs of a layer share a model."""
        key = _costs_of_a_layer(one)
        if key not in self._models:
            self._models[key] = model_on(job, self._system)
        return self._models[key]

    def _sums_of(self, one: Candidate, job: Job) -> ModelSums:
        """Return the sums over the layers of its model."""
        key = _costs_of_a_layer(one)
        if key not in self._sums:
            self._sums[key] = ModelSums(self._model(one, job))
        return self._sums[key]


def _without_layout(one: Candidate) -> Candidate:
    return one if one.layout is None else replace(one, layout=None)


def _costs_of_a_layer(one: Candidate) -> tuple[object, ...]:
    """Return all of a candidate that the costs of a layer follow from."""
    return one.tensor, one.context, one.expert, one.expert_tensor, one.micro_batch, one.recompute.modules


def step_of(candidate: Candidate, work: Workload, margin: float, order: Prepared | None = None) -> StepModel:
    """Return the model of the step with the stages of ``work``, in the candidate's order or another."""
    return StepModel(work, order or order_of(candidate), candidate.schedule, candidate.microbatches, margin)


def order_of(candidate: Candidate, most: int | None = None) -> Prepared:
    """Return the candidate's schedule, for ``most`` microbatches at most."""
    count = min(candidate.microbatches, most or candidate.microbatches)
    sizes = candidate.pipeline, count, candidate.chunks, candidate.splits_head, candidate.options
    made = whole_program if most is None else short_program
    return made(candidate.schedule, *sizes)
