"""Training steps that leave microbatches in flight for the next one: PipeDream and PipeDream-2BW."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_pg_rank
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.hooks.data_parallel import last_actions
from megatron_pp_ext.integration.runners import free_memory, tracing
from megatron_pp_ext.integration.runners.flushed import FlushedRunner
from megatron_pp_ext.integration.runners.message_groups import message_channels, message_groups
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs, model_stages
from megatron_pp_ext.request.updates import DelayCorrection, Updates
from megatron_pp_ext.runtime.executor import Recorder, execute
from megatron_pp_ext.runtime.look_ahead import LookAheadVersions
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.versions import VersionedStage, WeightVersions
from megatron_pp_ext.schedule.families import pipedream

RECORDED_UPDATES = 10
"""The number of updates in one --pipeline-trace; to write it, all stages have to wait for each other."""


class FlushFreeRunner(FlushedRunner):
    """Runs a training step as one update of a pipeline that never empties.

    An evaluation is a flushed step, over channels of its own: it uses the newest weights and does not touch
    what is in flight.  Nor does a checkpoint.  Megatron counts the samples of a step as consumed when their
    backwards are done, so what is in flight at the end is read again on resuming.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        super().__init__(pipeline)
        self._running: _RunningPipeline | None = None

    @property
    def most_version_bytes(self) -> int:
        """The peak of this rank's kept weight versions, in bytes, the newest one not counted."""
        return self._running.most_version_bytes if self._running else 0

    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        if inputs.forward_only:
            super()._run(inputs, group, shape, recorder)
            return
        if self._running is None:
            self._directions(group)  # for evaluations: no group can be made once messages are under way
            self._running = _RunningPipeline(self.pipeline, inputs, group, shape)
        self._running.update(inputs, recorder)

    def _recording(self, group: dist.ProcessGroup, inputs: StepInputs) -> Any:
        done, total = (self._running.done, self._running.total) if self._running else (0, RECORDED_UPDATES)
        parts = min(RECORDED_UPDATES, total)
        return tracing.recording(group, inputs.model, inputs.forward_only, part=done % parts, parts=parts)


class _RunningPipeline:
    """The state that lasts from update to update: this rank's stage, weight versions, messages in flight."""

    def __init__(
        self, pipeline: requested.Pipeline, inputs: StepInputs, group: dist.ProcessGroup, shape: Any
    ) -> None:
        assert pipeline.updates is not None
        args = get_args()
        self.done, self.total = 0, args.train_iters - args.curr_iteration
        self._ranks, self._rank = group.size(), get_pg_rank(group)
        self._updates = pipeline.updates
        about = {"stage": self._rank, "ranks": self._ranks, "interval": self._updates.interval}
        self._kept_after = partial(pipedream.versions_kept, self._updates.weights, **about)
        (model,) = inputs.model
        self._stage = model_stages(inputs, pipeline.placement, self._plan(), ModelStage)[self._rank]
        self._versions = WeightVersions(model.parameters())
        delay = self._updates.delay(self._rank, self._ranks)
        if delay and self._updates.correction is DelayCorrection.ERROR_FEEDBACK:
            self._versions = LookAheadVersions(model.parameters(), delay)
        require_room(self._updates, self._versions.bytes_of_one, group)
        version_of = partial(pipedream.version, self._updates.weights, **about)
        self._versioned = VersionedStage(self._stage, self._versions, version_of)
        self.most_version_bytes = 0
        self._channels = message_channels(group, message_groups(group), shape, inputs.config)
        self._buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
        if not self._updates.waits and args.clip_grad:
            print_rank_0(
                f"megatron_pp_ext: --clip-grad {args.clip_grad:g} goes by each pipeline stage's own gradient "
                f"norm under --pipeline-schedule {pipeline.name}; the log shows that of the last stage"
            )

    def _plan(self) -> Any:
        step = pipedream.step(self._ranks, self._updates.interval, self.done, self.total)
        return plan_rank(step, self._rank)

    def update(self, inputs: StepInputs, recorder: Recorder | None) -> None:
        """Run the forwards and backwards of one update, and keep the weights that are used once more."""
        if inputs.microbatches != self._updates.interval:
            raise RuntimeError(
                f"this step has {inputs.microbatches} microbatches while updates every "
                f"{self._updates.interval} are under way; keep the global batch size as it is, or choose a "
                "schedule that flushes, such as 1f1b"
            )
        plan = self._plan()
        self._stage.inputs, self._stage.last = inputs, last_actions(plan)[self._rank]
        self.done += 1
        is_last = self.done == self.total
        execute(plan, {self._rank: self._versioned}, self._channels, recorder, flush=is_last)
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


def require_room(updates: Updates, bytes_of_one: int, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on all ranks of the pipeline ``group``, if some device cannot hold its versions.

    ``bytes_of_one`` is the size of one version of this rank's weights.
    """
    ranks = group.size()
    devices: list[tuple[int, int]] = [(0, 0)] * ranks
    dist.all_gather_object(devices, (bytes_of_one, free_memory.free_bytes()), group=group)

    def lacking(interval: int) -> list[int]:
        """Return the bytes that each rank lacks, below 0 where some would be left."""
        counts = (replace(updates, interval=interval).copies(rank, ranks) for rank in range(ranks))
        return [count * size - free for count, (size, free) in zip(counts, devices, strict=True)]

    worst = max(range(ranks), key=lacking(updates.interval).__getitem__)
    if lacking(updates.interval)[worst] <= 0:
        return
    count = updates.copies(worst, ranks)
    size, free = devices[worst]
    longer = next((k for k in range(updates.interval + 1, ranks) if max(lacking(k)) <= 0), None)
    raise ValueError(
        f"updates every {updates.interval} microbatch(es) keep {count} older version(s) of {size:,} bytes of "
        f"weights on pipeline rank {worst}, which has {free:,} bytes free; "
        + (
            f"set --pipeline-update-interval to {longer}, and --global-batch-size with it"
            if longer
            else "choose a schedule that flushes, such as 1f1b, or more pipeline ranks"
        )
    )
