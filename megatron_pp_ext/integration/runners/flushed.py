"""Steps that leave no microbatch in flight: evaluations, and training steps under a schedule that flushes."""

from collections.abc import Hashable, Mapping
from functools import partial

import torch.distributed as dist

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import evaluation
from megatron_pp_ext.integration.runners.fine_grained_offload import FineGrainedOffload
from megatron_pp_ext.integration.runners.host_activations import HostActivations
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs, model_stages
from megatron_pp_ext.integration.runners.model_vocabulary import ModelVocabulary
from megatron_pp_ext.integration.runners.planned_stage import planned_stages, run_pair
from megatron_pp_ext.integration.runners.sources import Source
from megatron_pp_ext.integration.runners.transport import Transport
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.rank import Pairs, Rank, Recorder
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement


class FlushedSteps:
    """Takes a schedule for each number of microbatches, keeps it, and executes all its actions in a step.

    ``host`` moves the activations that leave.
    """

    def __init__(
        self, placement: Placement, source: Source, transport: Transport, host: HostActivations
    ) -> None:
        self._placement, self._source = placement, source
        self._transport, self._host = transport, host
        self._offload = FineGrainedOffload()
        self._plans: dict[tuple[int, bool, Hashable], RankPlan] = {}

    def run(self, inputs: StepInputs, recorder: Recorder) -> None:
        """See ``pipeline_runner.Steps``."""
        plan, placement = self.plan(inputs), self._placement
        channels = self._transport.channels(inputs)
        vocabulary = None
        if plan.shares_vocabulary:
            vocabulary = ModelVocabulary(inputs, placement, plan, self._transport.exchanges(inputs))
        stages: Mapping[int, ModelStage]
        pairs: Pairs | None = None
        if plan.has_pairs:
            stages = planned = planned_stages(inputs, placement, plan)
            pairs = partial(run_pair, planned) if self._transport.hides_exchanges else None
        else:
            make = vocabulary.make_stage if vocabulary else ModelStage
            stages = model_stages(inputs, placement, plan, make)
        away = self._host.before(plan)
        with self._offload.step(self._kind(inputs), plan, inputs):
            execute(plan, Rank(stages, channels, recorder, pairs, vocabulary, away))
        self._host.behind(plan)

    def plan(self, inputs: StepInputs) -> RankPlan:
        """Return what this rank does in the step; collective over the job."""
        kind = self._kind(inputs)
        if kind not in self._plans:
            if inputs.forward_only:
                schedule = make(evaluation(self._placement, inputs.microbatches)).schedule
            else:
                schedule = self._source.schedule(inputs)
            require_same_on_all(schedule)
            self._plans[kind] = plan_rank(schedule, inputs.group.rank())
        return self._plans[kind]

    def _kind(self, inputs: StepInputs) -> tuple[int, bool, Hashable]:
        """Return what all steps of one plan have in common."""
        phase = None if inputs.forward_only else self._source.phase(inputs)
        return inputs.microbatches, inputs.forward_only, phase


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
