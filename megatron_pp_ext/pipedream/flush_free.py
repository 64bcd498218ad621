"""Training steps that leave microbatches in flight for the next one: PipeDream and PipeDream-2BW."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import free_memory
from megatron_pp_ext.megatron.core.data_parallel import last_actions
from megatron_pp_ext.megatron.core.replicated_ranks import ranks_of_pipeline, sum_over_replicas
from megatron_pp_ext.megatron.requested import Settings
from megatron_pp_ext.megatron.runners.model_stage import ModelStage, StepInputs
from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
from megatron_pp_ext.megatron.runners.tracing import Tracing
from megatron_pp_ext.megatron.runners.transport import (
    Directions,
    LossesOnLastRank,
    ProcessGroups,
    message_channels,
    message_groups,
)
from megatron_pp_ext.runtime.activation_meter import ActivationMeter, watching
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_orders
from megatron_pp_ext.runtime.rank import Rank, Recorder, Stage, print_rank_0
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates


class _Reference(NamedTuple):
    """Stands in the autograd graph for a tensor that lies ``offset`` elements into a parameter."""

    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WeightVersions:
    """The versions of the ``parameters`` that need a gradient; the others never change.

    The newest weights stay where the optimizer knows them.  A copy of an older version is kept for as long as
    some microbatch needs it.  To compute with an old version its tensors take the place of the parameters'
    own (``Parameter.data``), which moves no data.

    Autograd keeps weights for the backward as well, and refuses to use them once the optimizer has written to
    them.  Inside ``using`` it therefore keeps a reference to the parameter instead of its numbers, and the
    backward finds the numbers of the version that is in place when it runs.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.newest = 0
        self._kept: dict[int, list[torch.Tensor]] = {}

    @property
    def bytes_of_one(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def kept_bytes(self) -> int:
        """The bytes of all versions but the newest."""
        return sum(tensor.nbytes for version in self._kept.values() for tensor in version)

    @property
    def kept(self) -> list[int]:
        """The versions that are kept in addition to the newest, oldest first."""
        return sorted(self._kept)

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Compute a forward or a backward with ``version`` of the weights; KeyError if it was not kept."""
        data = self._own()
        self._put(data if version == self.newest else self._kept[version])
        references = _References(self.parameters, watching())
        try:
            with torch.autograd.graph.saved_tensors_hooks(references.pack, references.unpack):
                yield
        finally:
            self._put(data)

    def update_follows(self, still_needed: Iterable[int]) -> None:
        """Keep the versions that are ``still_needed`` after the update that the optimizer is about to make.

        ``still_needed`` may name the newest version and older ones; all others are released.
        """
        versions = set(still_needed)
        for version in self._kept.keys() - versions:
            del self._kept[version]
        if self.newest in versions:
            self._kept[self.newest] = [data.clone() for data in self._own()]
        self.newest += 1

    def _own(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters]

    def _put(self, data: list[torch.Tensor]) -> None:
        for parameter, numbers in zip(self.parameters, data, strict=True):
            parameter.data = numbers


class VersionedStage:
    """Runs ``stage`` with version ``version_of(microbatch)`` of its weights."""

    def __init__(self, stage: Stage, versions: WeightVersions, version_of: Callable[[int], int]) -> None:
        self.stage, self.versions, self.version_of = stage, versions, version_of

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.forward(microbatch, activation)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.backward(microbatch, gradient)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.backward_input(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """See ``rank.Stage``; a weight's own gradient does not depend on its version."""
        self.stage.backward_weight(microbatch)


class _References:
    """Autograd hooks that recognise weights among saved tensors by where their numbers lie at the moment."""

    def __init__(self, parameters: list[torch.nn.Parameter], meter: ActivationMeter | None) -> None:
        self._keep_other = meter.pack if meter else lambda tensor: tensor
        self._sorted = sorted(parameters, key=torch.Tensor.data_ptr)
        self._starts = [parameter.data_ptr() for parameter in self._sorted]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps for ``tensor``: a reference if it is a weight."""
        position = bisect_right(self._starts, tensor.data_ptr()) - 1
        if position < 0:
            return self._keep_other(tensor)
        parameter, beyond = self._sorted[position], tensor.data_ptr() - self._starts[position]
        if beyond >= parameter.nbytes:
            return self._keep_other(tensor)
        return _Reference(parameter, tensor.shape, tensor.stride(), beyond // parameter.element_size())

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Return the tensor for the backward; a whole parameter is returned itself, with its attributes."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not isinstance(saved, _Reference):
            return ActivationMeter.unpack(saved)
        parameter = saved.parameter
        if saved.shape == parameter.shape and saved.stride == parameter.stride():
            return parameter
        data = parameter.data
        return data.as_strided(saved.shape, saved.stride, data.storage_offset() + saved.offset)


RECORDED_UPDATES = 10
"""The number of updates in one --pipeline-trace; to write it, all stages have to wait for each other."""


def runner(pipeline: requested.Pipeline, transport: ProcessGroups) -> PipelineRunner:
    """Return the runner of a pipeline that never flushes; its losses are brought over ``transport``."""
    steps = FlushFreeSteps(pipeline)
    losses = LossesOnLastRank(pipeline.placement, transport)
    return PipelineRunner(steps, Tracing(steps.part_of_trace), losses)


class FlushFreeSteps:
    """Runs a training step as one update of a pipeline that never empties.

    An evaluation is a flushed step, over channels of its own: it uses the newest weights and does not touch
    microbatches in flight.  Nor does a checkpoint.  Megatron counts the samples of a step as consumed when
    their backwards are done, so samples in flight at the end are read again on resuming.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        self._pipeline = pipeline
        self._place: tuple[_ReplicaPlace, Directions] | None = None
        self._running: _RunningPipeline | None = None

    @property
    def most_version_bytes(self) -> int:
        """The peak of this rank's kept weight versions, in bytes, the newest one not counted."""
        return self._running.most_version_bytes if self._running else 0

    def part_of_trace(self) -> tuple[int, int]:
        """Return the number of the next update in its trace, and the updates of one trace."""
        if self._running is None:
            return 0, RECORDED_UPDATES
        parts = min(RECORDED_UPDATES, self._running.total)
        return self._running.done % parts, parts

    def run(self, inputs: StepInputs, recorder: Recorder) -> None:
        if self._place is None:
            assert self._pipeline.updates is not None
            place = _ReplicaPlace(self._pipeline.updates.replicas, inputs.group, self._pipeline.settings)
            # The groups are for evaluations: none can be made once messages are under way.
            self._place = place, place.message_groups()
        place, groups = self._place
        if inputs.forward_only:
            plan = place.plan(pipedream.evaluation(place.replicas, inputs.microbatches), inputs)
            channels = message_channels(place.ranks, groups, inputs)
            execute(plan, Rank({place.stage: place.make_stage(inputs)}, channels, recorder))
            return
        if self._running is None:
            self._running = _RunningPipeline(self._pipeline, place, inputs)
        self._running.update(inputs, recorder)


class _ReplicaPlace:
    """The place of this rank among all replicas of the stages of its pipeline, whose group is ``group``."""

    def __init__(self, replicas: Replicas, group: dist.ProcessGroup, settings: Settings) -> None:
        self.replicas, self._settings = replicas, settings
        self.ranks = ranks_of_pipeline(group)
        self._rank = self.ranks.index(dist.get_rank())
        self.stage = replicas.stage_of(self._rank)

    def plan(self, orders: Sequence[Sequence[Action]], inputs: StepInputs, flushes: bool = True) -> RankPlan:
        """Return this rank's operations where all follow ``orders`` in a step with these ``inputs``."""
        return plan_orders(self.replicas.placed(orders, inputs.announces), self._rank, flushes)

    def make_stage(self, inputs: StepInputs) -> ModelStage:
        is_last = self.stage == self.replicas.stages - 1
        return ModelStage(inputs, self.stage, 0, vp_stage=None, is_last=is_last, last=None)

    def message_groups(self) -> Directions:
        """Make groups for messages; every rank of the world does so at the same time."""
        stages = [self.replicas.ranks_of(stage) for stage in range(self.replicas.stages)]
        edges = [pair for two in pairwise(stages) for pair in product(*two)]
        return message_groups(self._settings, self.ranks, edges)


class _RunningPipeline:
    """The state that lasts from update to update: this rank's stage, weight versions, messages in flight."""

    def __init__(self, pipeline: requested.Pipeline, place: _ReplicaPlace, inputs: StepInputs) -> None:
        assert pipeline.updates is not None
        settings = pipeline.settings
        self.done, self.total = 0, steps_to_come(settings, inputs)
        self._place, self._updates = place, pipeline.updates
        about: Any = {"stage": place.stage, "replicas": place.replicas, "interval": self._updates.interval}
        self._kept_after = partial(pipedream.versions_kept, self._updates.weights, **about)
        (model,) = inputs.model
        self._stage = place.make_stage(inputs)
        self._versions = WeightVersions(model.parameters())
        require_memory(self._updates, place.stage, self._versions.bytes_of_one)
        version_of = partial(pipedream.version, self._updates.weights, **about)
        self._versioned = VersionedStage(self._stage, self._versions, version_of)
        self.most_version_bytes = 0
        self._channels = message_channels(place.ranks, place.message_groups(), inputs)
        self._buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        if not place.replicas.is_straight:
            sum_over_replicas(inputs.model)
        if not self._updates.waits and settings.clip_grad:
            print_rank_0(
                f"megatron_pp_ext: --clip-grad {settings.clip_grad:g} goes by each pipeline stage's own "
                f"gradient norm under --pipeline-schedule {pipeline.name}; the log shows the last stage's"
            )

    def update(self, inputs: StepInputs, recorder: Recorder) -> None:
        """Run the forwards and backwards of one update, and keep the weights that are used once more."""
        if inputs.microbatches != self._updates.interval:
            raise RuntimeError(
                f"this step has {inputs.microbatches} microbatches while updates every "
                f"{self._updates.interval} are under way; keep the global batch size as it is, or choose a "
                "schedule that flushes, such as 1f1b"
            )
        step = pipedream.step(self._place.replicas, self._updates.interval, self.done, self.total)
        self.done += 1
        is_last = self.done == self.total
        plan, stage = self._place.plan(step, inputs, flushes=is_last), self._place.stage
        self._stage.inputs, self._stage.last = inputs, last_actions(plan.actions)[stage]
        execute(plan, Rank({stage: self._versioned}, self._channels, recorder))
        self._require_constant_buffers()
        self._versions.update_follows(self._kept_after(update=self.done) if not is_last else ())
        self.most_version_bytes = max(self.most_version_bytes, self._versions.kept_bytes)

    def _require_constant_buffers(self) -> None:
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version:
                raise RuntimeError(
                    f"the model's buffer {name} changes in a forward, and buffers have no versions: what is "
                    "in flight would compute with another one; choose a schedule that flushes, such as 1f1b"
                )


def steps_to_come(settings: Settings, inputs: StepInputs) -> int:
    """Return the updates from this one to the run's last; ValueError where no number of steps is known."""
    if settings.train_steps is None:
        raise ValueError(
            "train_steps is not given, but a pipeline that never flushes has to know its last training step; "
            "give the number of steps, or choose a schedule that flushes, such as 1f1b"
        )
    return settings.train_steps() - settings.steps_done(inputs.training_steps)


def require_memory(updates: Updates, stage: int, bytes_of_one: int) -> None:
    """Raise ValueError, on all ranks of the job, if some device cannot hold its versions.

    ``bytes_of_one`` is the size of one version of this rank's weights, which are of ``stage``.
    """
    devices: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(devices, (stage, bytes_of_one, free_memory.free_bytes()))
    replicas = updates.replicas

    def lacking(interval: int) -> list[int]:
        """Return the bytes that each rank lacks, below 0 where some would be left."""
        copies = replace(updates, interval=interval).copies
        return [copies(stage) * size - free for stage, size, free in devices]

    lacks = lacking(updates.interval)
    if max(lacks) <= 0:
        return
    stage, size, free = devices[lacks.index(max(lacks))]
    count = updates.copies(stage)
    every = replicas.full_round
    candidates = range(updates.interval + every, replicas.ranks - 1 + every, every)
    longer = next((interval for interval in candidates if max(lacking(interval)) <= 0), None)
    raise ValueError(
        f"updates every {updates.interval} microbatch(es) keep {count} older version(s) of {size:,} bytes of "
        f"weights in pipeline stage {stage}, where a rank has {free:,} bytes free; "
        + (
            f"set --pipeline-update-interval to {longer}, and --global-batch-size with it"
            if longer
            else "choose a schedule that flushes, such as 1f1b, or more pipeline ranks"
        )
    )
