"""A described model as a row of layers, with costs in proportion to operations."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.layout.stage_seconds import StageSeconds
from megatron_pp_ext.planner.step.estimate import RankMemory, StepModel
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement

_MACHINE = "h100"
"""The machine on which memory is counted, of which only comparisons between cuts are made."""


class ModelRow(ModelStages):
    """The layers of ``job``'s model, whose parts are ``model``, for a schedule that is called ``name``."""

    def __init__(self, job: Job, model: ModelParts, data: int, schedule: Schedule, name: str) -> None:
        self._model, self._data = model, data
        self._order, self._name = Prepared(schedule), name
        splits_head = schedule.placement.splits_head
        counted = StageSeconds(job, model, splits_head)
        super().__init__(job, counted, schedule.placement)

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""
        return without_messages(self._work(cut).costs)

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""
        if not self.can_be(cut):
            return [float("inf")] * self.placement.ranks
        return [rank.total for rank in self._memory(cut)]

    def capacity(self, cut: Cut, free: float) -> float:
        """Return the bytes of a device that has ``free`` ones left for a step by the state under ``cut``.

        The rank with most state, that is weights, gradients and optimizer, leaves the fewest.
        """
        ranks = self._memory(cut)
        return free + max(
            rank.total - rank.activations - rank.messages - rank.loss - rank.margin for rank in ranks
        )

    def _memory(self, cut: Cut) -> Sequence[RankMemory]:
        microbatches = self._order.timer.schedule.microbatches
        return StepModel(self._work(cut), self._order, self._name, microbatches).memory()

    def _work(self, cut: Cut) -> Workload:
        job = self._job.changed(pipeline_model_parallel_layout=self.spelled(cut))
        return work_of(job, self._model, self._data, self.placement)


def work_of(job: Job, model: ModelParts, data: int, placement: Placement) -> Workload:
    """Return the workload of ``job`` in the stages that it describes."""
    return Workload(job, system.read(_MACHINE), placement, data, model=model)


def without_messages(costs: Costs) -> Costs:
    """Return ``costs`` with messages that take no time, whose seconds are none in operations."""
    shared = costs.head and replace(costs.head, hidden=0.0, sums=0.0)
    return replace(costs, hop=0.0, head=shared)
