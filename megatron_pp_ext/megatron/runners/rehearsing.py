"""Runs one rank of a pipeline without the others, to measure what its actions cost."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners.flushed import StepSource
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import device
from megatron_pp_ext.processor import ProcessorTime, load
from megatron_pp_ext.runtime.activation_meter import plain_tensors, storages
from megatron_pp_ext.runtime.channels import Channels, DummyChannels
from megatron_pp_ext.runtime.rank import Recorder
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.actions import Action, Kind, Label
from megatron_pp_ext.schedule.costs import HeadCosts
from megatron_pp_ext.schedule.formats import csv_file, rehearsal_file
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective, RankRehearsal
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.recorded import KindSeconds, RankRecord, head_costs, kind_seconds, stage_costs

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "gather",
    "_allgather_base": "gather",
    "all_gather_single": "gather",
    "reduce_scatter": "gather",
    "_reduce_scatter_base": "gather",
    "reduce_scatter_single": "gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""The operations of ``Collective``, by the methods of a group that torch calls; torch 2.15 renamed three."""


class CollectiveRecorder:
    """Records actions with ``recorder`` and the collectives of the first microbatch.

    Collectives of data parallelism are left out: they reduce gradients once a step, while other work runs.

    The methods of torch's groups are replaced meanwhile.  A ``TorchDispatchMode`` would change what it
    watches: functions under ``torch.compile`` that are first called within one run uncompiled, up to torch
    2.13 for ever after.
    """

    def __init__(self, placement: Placement, recorder: Recorder) -> None:
        self.found: list[Collective] = []
        self._placement, self._recorder = placement, recorder

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        with self._recorder.during(action), nullcontext() if action.microbatch else self._watching(action):
            yield

    def span(self, label: Label) -> AbstractContextManager[None]:
        return self._recorder.span(label)

    @contextmanager
    def _watching(self, action: Action) -> Iterator[None]:
        # As the class keeps them: what getattr returns would not bind to a group when it is put back.
        methods = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _OPERATIONS}
        try:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, self._recording(action, _OPERATIONS[name], method))
            yield
        finally:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, method)

    def _recording(self, action: Action, operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(group: dist.ProcessGroup, *args: Any) -> Any:
            self._record(action, operation, group, args)
            return method(group, *args)

        return recorded

    def _record(self, action: Action, operation: str, group: dist.ProcessGroup, args: Any) -> None:
        members = dist.get_process_group_ranks(group)
        if len(members) < 2 or "DATA_PARALLEL" in group.group_desc:
            return
        chunk = self._placement.chunk_of(action.stage)
        size = max(sum(tensor.nbytes for tensor in plain_tensors(argument)) for argument in args[:2])
        stride = members[1] - members[0]
        self.found.append(Collective(chunk, str(action.kind), operation, size, len(members), stride))


class DummyTransport:
    """Takes the place of the other ranks; a ``transport.Transport``."""

    is_alone = True

    def __init__(self) -> None:
        self.message_bytes = 0

    def channels(self, inputs: StepInputs) -> Channels:
        group, shape, dtype = inputs.group, inputs.shape, inputs.config.pipeline_dtype
        if not shape:
            raise ValueError(
                "a rehearsal cannot make up messages of several lengths: unset variable_seq_lengths"
            )
        self.message_bytes = math.prod(shape) * dtype.itemsize
        return DummyChannels(dist.get_process_group_ranks(group), group, group, shape, dtype, device())

    def groups(self, feature: str, *like: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        """See ``Transport``: nothing is launched in them."""
        return like


class DummyLosses:
    """The losses of this rank, or one to be logged; ``pipeline_runner.Losses``."""

    def tokens(self, inputs: StepInputs) -> torch.Tensor:
        return inputs.tokens

    def losses(self, inputs: StepInputs) -> list[Any]:
        """See ``Losses``; a last rank that does not compute losses itself returns a dummy."""
        is_last = inputs.group.rank() == inputs.group.size() - 1
        if is_last and not inputs.losses:
            return [{"lm loss": torch.ones(2, device="cuda")}]
        return inputs.losses


class RehearsalRecording:
    """Records steps of this rank alone, and writes its measurements, from the second timed one on.

    A ``pipeline_runner.Recording``.

    Under Megatron's fake process group a process can be any rank of any world, and collectives do nothing.
    The rank runs its actions in the order of the schedule, and dummy tensors take the place of messages.  The
    first step, which warms up, counts bytes; all later ones are timed.
    """

    def __init__(self, pipeline: requested.Pipeline, source: StepSource, transport: DummyTransport) -> None:
        self._placement, self._source, self._transport = pipeline.placement, source, transport
        self._recorder: StepRecorder | None = None
        self._bytes: RankRecord | None = None
        self._timed: list[RankRecord] = []
        self._collectives: CollectiveRecorder | None = None
        self._ended = 0.0
        self._outside: list[float] = []
        self._took: list[float] = []
        self._before = ProcessorTime()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        register_optimizer_step_post_hook(self._note_optimizer)

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    @contextmanager
    def step(self, inputs: StepInputs) -> Iterator[Recorder]:
        if self._recorder is None:
            self._recorder = StepRecorder(p for chunk in inputs.model for p in chunk.parameters())
            self._collectives = CollectiveRecorder(self._placement, self._recorder)
            with self._recorder.step():
                yield self._collectives
            return
        self._recorder.forget()
        with self._recorder.step(metered=False):
            yield self._recorder

    @contextmanager
    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> Iterator[None]:
        start = perf_counter()
        if self._timed:
            self._outside.append(start - self._ended)
        elif self._bytes is not None:
            self._before = ProcessorTime.now()
        yield
        torch.cuda.synchronize()
        self._ended = perf_counter()
        assert self._recorder is not None
        if self._bytes is None:
            self._bytes = self._recorder.record
        else:
            self._timed.append(self._recorder.record)
            self._took.append(self._ended - start)
        if self._outside:
            self._write(inputs)

    def _write(self, inputs: StepInputs) -> None:
        path, rank = requested.require().rehearsal, inputs.group.rank()
        assert path is not None and self._bytes is not None and self._collectives is not None
        schedule = self._source.schedule(inputs)
        csv_file.write(schedule, path.with_suffix(".csv"))
        # Means within a step, since they add up to its length, and medians would fall short of it; the median
        # over steps, so that a step that something else disturbed does not count.
        means = [kind_seconds([record], mean) for record in self._timed]
        seconds = {key: median(step[key] for step in means) for key in means[0]}
        lasting = _LastingBytes(inputs.model, self._optimizers.values())
        measured = RankRehearsal(
            rank=rank,
            schedule=schedule.name,
            digest=schedule.digest,
            layers=requested.require().layers,
            stages=tuple(
                replace(stage_costs(stage, seconds, self._bytes), **_parameters(chunk))
                for stage, chunk in zip(self._placement.stages_of(rank), inputs.model, strict=True)
            ),
            head=_head_costs(self._placement.stage_of(rank, 0), seconds, self._bytes)
            if schedule.placement.splits_head
            else None,
            collectives=tuple(self._collectives.found),
            message_bytes=self._transport.message_bytes,
            outside_seconds=median(self._outside),
            peak_activation_bytes=int(self._bytes.peak_bytes),
            weight_bytes=lasting.weights,
            gradient_bytes=lasting.gradients,
            optimizer_bytes=lasting.optimizer,
            device_bytes=torch.cuda.max_memory_allocated() or None,
            ratios=tuple(
                tuple((e.end - e.start) / seconds[e.action.stage, e.action.kind] for e in record.events)
                for record in self._timed
            ),
            step_seconds=tuple(self._took),
            waited=ProcessorTime.now().waited_since(self._before),
            load=load(),
        )
        rehearsal_file.write(measured, path)


def _head_costs(first: int, seconds: KindSeconds, record: RankRecord) -> HeadCosts:
    """Return the costs of this rank's part of a split head; ``first`` is the rank's first stage."""
    logits = seconds[first, Kind.S]
    gradient = seconds.get((first, Kind.T), logits)
    return replace(head_costs([record]), scores=logits, weight_gradient=gradient)


def _parameters(chunk: torch.nn.Module) -> dict[str, int]:
    """Return how many weights ``chunk`` has, and apart from these how many of experts.

    Megatron marks the latter where each expert-parallel rank has its own, and sums their gradients over
    fewer ranks.
    """
    counts = {"parameters": 0, "expert_parameters": 0}
    for weight in chunk.parameters():
        counts["parameters" if getattr(weight, "allreduce", True) else "expert_parameters"] += weight.numel()
    return counts


class _LastingBytes:
    """The bytes of the tensors that outlive a step; a storage that several tensors share counts once."""

    def __init__(self, model: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        chunks = list(model)
        self._seen: set[torch.UntypedStorage] = set()
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
        sizes = storages(list(tensors))
        total = sum(size for key, size in sizes.items() if key not in self._seen)
        self._seen.update(sizes)
        return total
