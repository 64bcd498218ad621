"""Running one rank of a pipeline without the others, to measure what its actions cost.

Megatron's fake process group lets a process believe that it is any rank of any world: collectives do
nothing.  The schedule in force runs as it would, with messages made up.  The first step, which warms up,
counts bytes; all later ones are timed.
"""

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.request import updates
from megatron_pp_ext.integration.runners import tracing
from megatron_pp_ext.integration.runners.collectives import Collectives
from megatron_pp_ext.integration.runners.flushed import PipelineRunner
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.planner.rehearsal import RankRehearsal
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import StageCosts
from megatron_pp_ext.schedule.recorded import RankRecord
from megatron_pp_ext.schedule.recorded_costs import kept_bytes

type Seconds = dict[tuple[int, Kind], float]
"""Of a stage's kinds of actions."""

WARM_UP = 1
"""Steps before those that are timed."""


def refuse_flags(args: Namespace) -> None:
    """Refuse what --rehearse-pipeline cannot go with; ValueError with one line."""
    if args.rehearse_pipeline is None:
        return
    for flag, is_set, fix in (
        ("--pipeline-schedule auto", args.pipeline_schedule == "auto", "choose flex, and give it the limit"),
        (
            f"--pipeline-schedule {args.pipeline_schedule}, which never flushes",
            args.pipeline_schedule in updates.NAMES,
            "choose another schedule",
        ),
        ("--pipeline-trace", args.pipeline_trace is not None, "leave it out"),
        ("--pipeline-profile-steps", args.pipeline_profile_steps is not None, "leave it out"),
        ("--profile-pipeline", args.profile_pipeline is not None, "leave it out"),
    ):
        if is_set:
            raise ValueError(f"a rehearsal cannot go with {flag}; {fix}")
    if not getattr(args, "fake_process_group", False):
        raise ValueError("--rehearse-pipeline needs --fake-process-group; start it with mpp rehearse")


class RehearsalRunner(PipelineRunner):
    """Runs training steps of this rank alone, and writes what it measured after each."""

    def __init__(self, pipeline: requested.Pipeline) -> None:
        super().__init__(pipeline)
        self._recorder: StepRecorder | None = None
        self._bytes: RankRecord | None = None
        self._timed: list[RankRecord] = []
        self._collectives = Collectives(pipeline.placement)
        self._message_bytes = 0
        self._steps = 0
        self._ended = 0.0
        self._outside: list[float] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        register_optimizer_step_post_hook(self._remember)

    def _remember(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        start = perf_counter()
        if self._steps > WARM_UP:
            self._outside.append(start - self._ended)
        super()._run(inputs, group, shape, recorder)
        torch.cuda.synchronize()
        self._ended = perf_counter()
        assert self._recorder is not None
        if self._bytes is None:
            self._bytes = self._recorder.record
        else:
            self._timed.append(self._recorder.record)
        self._steps += 1
        if self._outside:
            self._write(inputs, group)

    @contextmanager
    def _recording(self, group: dist.ProcessGroup, inputs: StepInputs) -> Iterator[Recorder]:
        if self._recorder is None:
            self._recorder = StepRecorder(p for chunk in inputs.model for p in chunk.parameters())
            with self._recorder.step():
                yield _Both(self._recorder, self._collectives)
            return
        self._recorder.forget()
        with self._recorder.step(metered=False):
            yield self._recorder

    def _channels(self, group: dist.ProcessGroup, shape: Any, config: Any) -> Channels:
        if not shape:
            raise ValueError(
                "a rehearsal cannot make up messages of several lengths: unset variable_seq_lengths"
            )
        self._message_bytes = math.prod(shape) * config.pipeline_dtype.itemsize
        ranks = dist.get_process_group_ranks(group)
        return MadeUpChannels(ranks, group, group, shape, config.pipeline_dtype, tracing.device())

    def _make_home(self, holder: int, group: dist.ProcessGroup) -> Any:
        return _NobodyHome(group)

    def _write(self, inputs: StepInputs, group: dist.ProcessGroup) -> None:
        path, rank = requested.require().rehearsal, group.rank()
        assert path is not None and self._bytes is not None
        schedule = self._schedule(inputs.microbatches, False, group)
        csv_file.write(schedule, path.with_suffix(".csv"))
        # A step is as long as its actions together, so that medians of actions would be too short; a step
        # that something else disturbed does not count.
        means = [_means(record) for record in self._timed]
        seconds = {key: median(step[key] for step in means) for key in means[0]}
        held = _Held(inputs.model, self._optimizers.values())
        RankRehearsal(
            rank=rank,
            schedule=schedule.name,
            digest=schedule.digest,
            layers=requested.require().layers,
            stages=tuple(
                _costs(stage, seconds, self._bytes) for stage in self.pipeline.placement.stages_of(rank)
            ),
            collectives=tuple(self._collectives.heard),
            message_bytes=self._message_bytes,
            outside_seconds=median(self._outside),
            peak_activation_bytes=self._bytes.peak_bytes,
            weight_bytes=held.weights,
            gradient_bytes=held.gradients,
            optimizer_bytes=held.optimizer,
            device_bytes=torch.cuda.max_memory_allocated() or None,
            ratios=tuple(
                tuple((e.end - e.start) / seconds[e.action.stage, e.action.kind] for e in record.events)
                for record in self._timed
            ),
        ).write(path)


class _NobodyHome:
    """Stands where ``losses.LossesHome`` does: the rank that has the losses is not there to send them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._is_reader = group.rank() == group.size() - 1

    def bring_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def bring_losses(self, losses: list[Any]) -> list[Any]:
        """The last rank gets a loss to log."""
        return [{"lm loss": torch.ones(2, device="cuda")}] if self._is_reader else losses


class _Both:
    """A recorder of bytes that listens to collectives as well."""

    def __init__(self, record: StepRecorder, collectives: Collectives) -> None:
        self._record, self._collectives = record, collectives

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        with self._record.during(action), self._collectives.during(action):
            yield


def _means(record: RankRecord) -> Seconds:
    """Of one step."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for (stage, kind, _), start, end, _ in record.events:
        seconds.setdefault((stage, kind), []).append(end - start)
    return {key: mean(values) for key, values in seconds.items()}


def _costs(stage: int, seconds: Seconds, record: RankRecord) -> StageCosts:
    """Seconds and bytes of a stage; a whole backward counts half for each gradient."""
    whole = seconds.get((stage, Kind.B))
    i, w = (whole / 2, whole / 2) if whole else (seconds[stage, Kind.I], seconds[stage, Kind.W])
    return StageCosts(seconds[stage, Kind.F], i, w, *kept_bytes(record, stage))


class _Held:
    """Bytes of the tensors that outlive a step; what shares a storage counts once."""

    def __init__(self, model: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        chunks = list(model)
        self._seen: set[int] = set()
        self.weights = self._count(p.data for chunk in chunks for p in chunk.parameters())
        buffers = [
            buffer
            for chunk in chunks
            for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ()))
        ]
        self.gradients = self._count(buffer.grad_data for buffer in buffers)
        self.optimizer = sum(self._of(optimizer) for optimizer in optimizers)

    def _of(self, optimizer: torch.optim.Optimizer) -> int:
        weights = (p.data for group in optimizer.param_groups for p in group["params"])
        state = (value for values in optimizer.state.values() for value in values.values())
        return self._count([*weights, *(value for value in state if isinstance(value, torch.Tensor))])

    def _count(self, tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total
