"""Steps that leave no microbatch in flight: their schedule, what features bring to them, and their run."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Option, evaluation
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.model_stage import ModelStage, StepInputs, model_stages
from megatron_pp_ext.megatron.runners.pipeline_runner import Recording
from megatron_pp_ext.megatron.runners.transport import Transport
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.rank import Rank, Recorder
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement

if TYPE_CHECKING:
    from megatron_pp_ext.megatron.runners.cuda_graphs import GraphSlots
    from megatron_pp_ext.megatron.runners.fine_grained_offload import FineGrainedOffload
    from megatron_pp_ext.megatron.runners.local_graphs import LocalGraphs


@dataclass(slots=True)
class Step:
    """A step before its stages are made.

    ``plan`` is what this rank does of ``schedule``.  A feature may set ``make_stage``, which takes what
    ``ModelStage`` takes, and add to ``parts`` what its operations work with (``rank.Rank.parts``).  It may
    set ``plan`` to another one, the same for all ranks that meet in the step.
    """

    inputs: StepInputs
    placement: Placement
    schedule: Schedule
    plan: RankPlan
    transport: Transport
    make_stage: Callable[..., ModelStage] = ModelStage
    parts: list[object] = field(default_factory=list)
    measured: Mapping[int, Sequence[Costs]] = field(default_factory=dict)
    """What microbatches have cost in measured steps (``StepSource.measured``)."""
    free: Sequence[float] = ()
    """The bytes that each rank has for the step (``StepSource.free``); none if not measured."""
    may_move_weights: bool = False
    """Whether W may have other places than in the schedule, here or in other replicas."""


StepPart = Callable[[Step], AbstractContextManager[None]]
"""Returns the context of a step: it changes the ``Step`` on entry, and closes what it has opened on exit."""


def step_parts(pipeline: Pipeline) -> list[StepPart]:
    """Return all features' parts of the steps of ``pipeline``, in the order in which they are entered."""
    return [
        *(part for feature in FEATURES for part in feature.data_parts(pipeline)),
        *(part for feature in FEATURES for part in feature.step_parts(pipeline)),
    ]


class StepSource(Protocol):
    """Gives the schedules of training steps.

    All ranks of a pipeline ask in the same steps and in the same order, so it may communicate, as long as it
    does so on every rank.  Pipelines may have other numbers of microbatches than their replicas.
    """

    def phase(self, inputs: StepInputs) -> Hashable:
        """Return a value whose change, in the same step on all ranks, asks for another schedule."""

    def schedule(self, inputs: StepInputs) -> Schedule:
        """Return the schedule of the step that is about to run, with the pipeline's placement.

        It must be the same on all ranks of the pipeline, which compare digests.  Called once for each number
        of microbatches and ``phase``.
        """

    def ordinary(self, inputs: StepInputs) -> Schedule | None:
        """Return the schedule of a step with the ordinary number of microbatches; None if this step has it.

        It is the same on all ranks of the job, whatever number each of them runs.
        """

    @property
    def measured(self) -> Mapping[int, Sequence[Costs]]:
        """The costs of each microbatch in the steps that were measured so far, the same on all ranks.

        Steps go by the number of training steps that the process had run before.
        """

    @property
    def stage_costs(self) -> Costs | None:
        """The costs of the stages in the steps that were measured; None before, and where none are."""

    @property
    def free(self) -> Sequence[float]:
        """The bytes that each rank has for activations and messages of a step, where they were measured."""


class Requested:
    """The requested schedule; after the first step it may be made for the memory that is free then."""

    def __init__(self, pipeline: requested.Pipeline) -> None:
        assert pipeline.source is not None
        self._source = pipeline.source
        self._measures_memory = catalog.abilities(pipeline.source.name).measures_memory
        self._ordinary = pipeline.request.microbatches
        self._free_bytes: Sequence[float] = ()

    def phase(self, inputs: StepInputs) -> Hashable:
        return self._measures_memory and inputs.training_steps > 0

    def schedule(self, inputs: StepInputs) -> Schedule:
        return self._schedule(inputs.microbatches, inputs)

    def ordinary(self, inputs: StepInputs) -> Schedule | None:
        return None if inputs.microbatches == self._ordinary else self._schedule(self._ordinary, inputs)

    @property
    def measured(self) -> Mapping[int, Sequence[Costs]]:
        return {}

    @property
    def stage_costs(self) -> Costs | None:
        return None

    @property
    def free(self) -> Sequence[float]:
        return self._free_bytes

    def _schedule(self, microbatches: int, inputs: StepInputs) -> Schedule:
        free = self._measured_once() if self._measures_memory and inputs.training_steps else None
        return self._source.schedule(microbatches, free, model_options(inputs.model, self._source.placement))

    def _measured_once(self) -> Sequence[float]:
        """Return the free bytes of each pipeline rank, measured in the second training step.

        All ranks of the job build a schedule in that step.  In later ones replicas may come alone, with a
        number of microbatches that others have not or know already.
        """
        from megatron_pp_ext.megatron.core.free_memory import free_bytes_by_rank

        self._free_bytes = self._free_bytes or free_bytes_by_rank()
        return self._free_bytes


def model_options(model: Sequence[Any], placement: Placement) -> tuple[Option, ...]:
    """Return the options that features read off the chunks of ``model``, which are placed so."""
    return tuple(filter(None, (feature.model_option(model, placement) for feature in FEATURES)))


class Guide(StepSource, Recording, Protocol):
    """A source whose schedules follow from what it records of the steps before."""


def guide_of(pipeline: requested.Pipeline) -> Guide | None:
    """Return the guide of the first feature that has one for ``pipeline``, or None."""
    return next(filter(None, (feature.guide(pipeline) for feature in FEATURES)), None)


class FlushedSteps:
    """Takes a schedule for each number of microbatches, keeps it, and executes all its actions in a step."""

    def __init__(self, pipeline: Pipeline, source: StepSource, transport: Transport) -> None:
        self.placement, self._source, self._transport = pipeline.placement, source, transport
        self._options = pipeline.request.options
        self.splits_backward = pipeline.request.may_split_backward
        self._parts = step_parts(pipeline)
        self._offload: FineGrainedOffload | None = None
        self._local_graphs: LocalGraphs | None = None
        self._schedules: dict[tuple[int, bool, Hashable], Schedule] = {}
        self._plans: dict[tuple[int, bool, Hashable], RankPlan] = {}
        self.graphs: GraphSlots | None = None
        """The slots of the layers' CUDA graphs, once these are captured."""

    def run(self, inputs: StepInputs, recorder: Recorder) -> None:
        plan, kind = self.plan(inputs), self._kind(inputs)
        step = Step(
            inputs,
            self.placement,
            self._schedules[kind],
            plan,
            self._transport,
            measured=self._source.measured,
            free=self._source.free,
        )
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part(step))
            stages = model_stages(inputs, self.placement, step.plan, step.make_stage)
            self._reduce_as_replicas(step)
            if self.graphs is not None:
                self.graphs.begin(step.plan)
            channels = self._transport.channels(inputs)
            with self._offloading(kind, step), self._replaying(step):
                execute(step.plan, Rank(stages, channels, recorder, step.parts))

    def plan(self, inputs: StepInputs) -> RankPlan:
        """Return this rank's plan for the step, unless a feature changes it.

        Collective over the pipeline, and the first time over the job.
        """
        kind = self._kind(inputs)
        if kind not in self._plans:
            if inputs.forward_only:
                request = evaluation(self.placement, inputs.microbatches, self._options)
                schedule = make(request).schedule
            else:
                schedule = self._source.schedule(inputs)
            require_same_schedule(schedule, inputs.groups, in_job=not self._plans)
            self._schedules[kind] = schedule
            self._plans[kind] = plan_rank(schedule, inputs.group.rank())
        return self._plans[kind]

    def schedule(self, inputs: StepInputs) -> Schedule:
        """Return the schedule of the step, which ``plan`` has read."""
        return self._schedules[self._kind(inputs)]

    @property
    def stage_costs(self) -> Costs | None:
        """The costs of the stages in the steps of this run that were measured; None before."""
        return self._source.stage_costs

    def _offloading(self, kind: Hashable, step: Step) -> AbstractContextManager[None]:
        """Return the context in which Megatron offloads activations in the order of the step."""
        if not step.inputs.config.fine_grained_activation_offloading:
            return nullcontext()
        from megatron_pp_ext.megatron.runners.fine_grained_offload import FineGrainedOffload

        self._offload = self._offload or FineGrainedOffload()
        return self._offload.step(kind, step.plan, step.inputs)

    def _replaying(self, step: Step) -> AbstractContextManager[None]:
        """Return the context in which Megatron notes the order of its own graphs, or replays them in it."""
        if getattr(step.inputs.config, "cuda_graph_impl", None) != "local":
            return nullcontext()
        from megatron_pp_ext.megatron.runners.local_graphs import LocalGraphs

        self._local_graphs = self._local_graphs or LocalGraphs()
        return self._local_graphs.step(step.plan, step.inputs)

    def training_plans(self) -> list[RankPlan]:
        """Return this rank's plans of the training steps so far."""
        return [plan for (_, forward_only, _), plan in self._plans.items() if not forward_only]

    def _reduce_as_replicas(self, step: Step) -> None:
        """Let gradients be reduced in one order in all replicas.

        Replicas may have other numbers of microbatches, and W in other places.  A collective has no name: one
        that is launched as the second here would meet another's first.
        """
        inputs, plan = step.inputs, step.plan
        if not inputs.data_parallel.overlaps or inputs.forward_only:
            return
        ordinary = self._source.ordinary(inputs)
        if ordinary is None and step.may_move_weights:
            ordinary = step.schedule
        if ordinary is not None:
            inputs.data_parallel.reduce_as(
                ordinary.orders[plan.rank], plan.actions, self.placement, step.may_move_weights
            )

    def _kind(self, inputs: StepInputs) -> tuple[int, bool, Hashable]:
        phase = None if inputs.forward_only else self._source.phase(inputs)
        return inputs.microbatches, inputs.forward_only, phase


_GROUPS = "pp", "tp", "cp", "ep", "expt_tp", "gtp_remat", "expt_gtp_remat"
"""Megatron's names of the groups that communicate within a step: of a pipeline, and of shared experts."""


type _Ranks = dict[tuple[int, str], int]
"""(microbatches, digest of a schedule) -> a rank that has built it."""


def require_same_schedule(schedule: Schedule, groups: Any, in_job: bool = False) -> None:
    """Raise RuntimeError unless all ranks that meet in a step have built this schedule; collective.

    These are the ranks of a pipeline and of pipelines that share experts, as ``groups`` has them
    (``ProcessGroupCollection``): with different schedules they would wait for each other for ever.  With
    ``in_job`` all ranks of the job call this, and those with as many microbatches have to agree too.
    """
    ranks = {(schedule.microbatches, schedule.digest): dist.get_rank()}
    if in_job:
        gathered = _first_ranks(ranks, dist.group.WORLD)
        ranks = {entry: rank for entry, rank in gathered.items() if entry[0] == schedule.microbatches}
    for group in filter(None, (getattr(groups, name, None) for name in _GROUPS)):
        ranks = _first_ranks(ranks, group)  # what one group has found travels on through the next
    if len(ranks) == 1:
        return
    (first, rank), (second, other), *_ = sorted(ranks.items(), key=lambda entry: entry[1])
    if first[0] != second[0]:
        raise RuntimeError(
            f"rank {rank} has {first[0]} microbatches in this step and rank {other} has {second[0]}; give "
            "all ranks of a pipeline, and pipelines that share experts, the same num_microbatches"
        )
    raise RuntimeError(
        f"ranks {rank} and {other} of this job built different schedules for {schedule.name!r} ({first[1]} "
        f"and {second[1]}); all must run the same megatron_pp_ext with the same flags and files"
    )


def _first_ranks(ranks: _Ranks, group: Any) -> _Ranks:
    """Return the lowest rank that ``group`` knows for each schedule; collective over it."""
    gathered = [ranks] * group.size()
    dist.all_gather_object(gathered, ranks, group=group)
    return {
        key: min(of_rank[key] for of_rank in gathered if key in of_rank) for key in set().union(*gathered)
    }
