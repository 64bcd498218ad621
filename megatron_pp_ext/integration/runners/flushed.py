"""Steps that leave no microbatch in flight: evaluations, and training steps under a schedule that flushes."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners.free_memory import free_bytes_by_rank
from megatron_pp_ext.integration.runners.message_groups import message_channels, vocabulary_exchanges
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs, model_stages
from megatron_pp_ext.integration.runners.model_vocabulary import ModelVocabulary, has_frozen_output
from megatron_pp_ext.integration.runners.pipeline_runner import PipelineRunner
from megatron_pp_ext.integration.runners.planned_stage import PlannedPairs, PlannedStage, planned_stages
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import Pairs, Recorder, execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.vocabulary import without_weight_gradients


class FlushedRunner(PipelineRunner):
    """Builds a schedule for each number of microbatches, keeps it, and executes all its actions in a step.

    A subclass may override ``_schedule``, ``_phase``, ``_channels``, ``_pairs`` and ``_make_exchanges``.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        super().__init__(pipeline)
        self._exchanges: Exchanges | None = None
        self._has_frozen_output = False
        self._plans: dict[tuple[int, bool, Hashable], RankPlan] = {}

    def _schedule(self, microbatches: int, forward_only: bool, group: dist.ProcessGroup) -> Schedule:
        """Return the schedule of the step that is about to run, with the pipeline's placement.

        It must be the same on all ranks of the job, which compare digests.  Called once for each number of
        microbatches, kind of step and ``_phase``.
        """
        if forward_only:
            return catalog.forward_only(self.pipeline.placement, microbatches)
        assert self.pipeline.source is not None
        free_bytes = free_bytes_by_rank if self._training_steps else None
        schedule = self.pipeline.source.build(microbatches, free_bytes)
        return without_weight_gradients(schedule) if self._has_frozen_output else schedule

    def _phase(self) -> Hashable:
        """Return a value whose change, in the same step on all ranks, makes ``_schedule`` be called again."""
        return self._training_steps > 0

    def _channels(self, group: dist.ProcessGroup, shape: Any, config: Any) -> Channels:
        """Return the channels of one step for messages of ``shape`` in the pipeline ``group``."""
        return message_channels(dist.get_process_group_ranks(group), self._directions(group), shape, config)

    def _pairs(self, stages: Mapping[int, PlannedStage]) -> Pairs | None:
        """Return what runs the pairs of ``stages``; None lets their actions run one after the other."""
        return PlannedPairs(stages)

    def _make_exchanges(self, group: dist.ProcessGroup) -> Exchanges:
        """Return the exchanges of a vocabulary that the pipeline ``group`` shares; all ranks call it once."""
        return vocabulary_exchanges(group)

    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        self._has_frozen_output = has_frozen_output(inputs.model)
        plan = self._plan(inputs.microbatches, inputs.forward_only, group)
        is_paired = any(step.is_paired for step in plan.steps)
        stages: Mapping[int, ModelStage]
        pairs: Pairs | None = None
        if is_paired:
            stages = planned = planned_stages(inputs, self.pipeline.placement, plan)
            pairs = self._pairs(planned)
        else:
            stages = model_stages(inputs, self.pipeline.placement, plan, ModelStage)
        channels = self._channels(group, shape, inputs.config)
        vocabulary = self._vocabulary(inputs, plan, group, shape) if plan.loss_stage is not None else None
        inputs.ends = vocabulary
        execute(plan, stages, channels, recorder, vocabulary=vocabulary, pairs=pairs)

    def _vocabulary(
        self, inputs: StepInputs, plan: RankPlan, group: dist.ProcessGroup, shape: Any
    ) -> ModelVocabulary:
        if self._exchanges is None:
            self._exchanges = self._make_exchanges(group)
        return ModelVocabulary(inputs, self.pipeline.placement, plan, self._exchanges, shape)

    def _plan(self, microbatches: int, forward_only: bool, group: dist.ProcessGroup) -> RankPlan:
        key = microbatches, forward_only, self._phase()
        if key not in self._plans:
            schedule = self._schedule(microbatches, forward_only, group)
            require_same_on_all(schedule)
            self._plans[key] = plan_rank(schedule, group.rank())
        return self._plans[key]


def require_same_on_all(schedule: Schedule) -> None:
    """Raise RuntimeError unless all ranks of the job have built this schedule; collective.

    Ranks of one pipeline with different schedules would wait for each other for ever.  So would ranks of
    different pipelines that share experts, a context or a reduction.
    """
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, schedule.digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise RuntimeError(
            f"ranks 0 and {other} of this job built different schedules for {schedule.name!r} ({digests[0]} "
            f"and {digests[other]}); all must run the same megatron_pp_ext with the same flags and files"
        )
