"""The product's own executor, channels and plans run for one rank after the other and leave its launches."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import DIMENSIONS, Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.schedule.actions import Kind, Schedule
from tests.support.launches.entries import Entry, HostWait, Kernel, Launches, Transfer, Wait

SECONDS: Mapping[Kind, float] = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}
"""What one chunk's actions take, in the papers' unit."""


class Recording:
    """What one rank launched so far.

    ``sends_look_done``: a send is told to be done whenever it is asked, so that it is waited for at once;
    otherwise nobody is told so, and the host goes as far ahead as it may.
    """

    def __init__(self, sends_look_done: bool = False) -> None:
        self.entries: list[Entry] = []
        self.sends_look_done = sends_look_done
        self._last_on_compute: int | None = None

    def add(self, entry: Entry) -> int:
        """Launch ``entry``; its number."""
        if isinstance(entry, Kernel | Wait):
            self._last_on_compute = len(self.entries)
        self.entries.append(entry)
        return len(self.entries) - 1

    def stop_for_compute(self) -> None:
        """The host waits for the compute stream: a tensor travels between its memory and the device's."""
        if self._last_on_compute is not None:
            self.add(HostWait(self._last_on_compute))


class RecordedWork:
    """A message under way."""

    def __init__(self, recording: Recording, number: int, stops_host: bool, looks_done: bool) -> None:
        self._recording, self._number = recording, number
        self._stops_host, self._looks_done = stops_host, looks_done

    def wait(self) -> bool:
        """Stop the compute stream and, for a shape, which is read next, the host."""
        wait = self._recording.add(Wait(self._number))
        if self._stops_host:
            self._recording.add(HostWait(wait))
        return True

    def is_completed(self) -> bool:
        return self._looks_done


class RecordingGroup:
    """A process group that notes its messages; a rank has one number in pipeline, group and world.

    A message that tells a shape tells ``shape``; others leave the receiver's tensor alone.
    """

    def __init__(self, name: str, recording: Recording, shape: Sequence[int]) -> None:
        self._name, self._recording, self._shape = name, recording, torch.tensor(shape)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        tells_shape = tensors[0].dtype == torch.long
        if tells_shape:
            self._recording.stop_for_compute()
        return self._launch(peer, True, tells_shape, False)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        tells_shape = tensors[0].dtype == torch.long
        if tells_shape:
            tensors[0].copy_(self._shape)
        return self._launch(peer, False, tells_shape, tells_shape)

    def _launch(self, peer: int, is_send: bool, tells_shape: bool, stops_host: bool) -> RecordedWork:
        transfer = Transfer(self._name, peer, is_send, "shape" if tells_shape else "")
        looks_done = is_send and self._recording.sends_look_done
        return RecordedWork(self._recording, self._recording.add(transfer), stops_host, looks_done)


class NamedKernels:
    """A stage, as ``executor.Stage``, that launches one kernel an action."""

    def __init__(
        self, stage: int, recording: Recording, output: torch.Tensor, seconds: Mapping[Kind, float]
    ) -> None:
        self._stage, self._recording, self._output, self._seconds = stage, recording, output, seconds

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        return self._launch(Kind.F, microbatch)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        return self._launch(Kind.B, microbatch)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        return self._launch(Kind.I, microbatch)

    def backward_weight(self, microbatch: int) -> None:
        self._launch(Kind.W, microbatch)

    def _launch(self, kind: Kind, microbatch: int) -> torch.Tensor:
        self._recording.add(Kernel(f"{self._stage}{kind}{microbatch}", self._seconds[kind]))
        return self._output


def plans(steps: Sequence[Schedule]) -> list[list[RankPlan]]:
    """``[r]`` are rank r's plans for ``steps``."""
    return [[plan_rank(schedule, rank) for schedule in steps] for rank in range(steps[0].ranks)]


def record(steps: Sequence[Schedule], **options: Any) -> tuple[Launches, ...]:
    """What all ranks launch in ``steps``, of which only the last flushes; options as ``record_plans``."""
    return record_plans(plans(steps), **options)


def record_plans(
    plans_of_ranks: Sequence[Sequence[RankPlan]],
    *,
    seconds: Mapping[Kind, float] = SECONDS,
    tells_shapes: bool = False,
    sends_look_done: bool = False,
    synchronized_between: bool = False,
) -> tuple[Launches, ...]:
    """What all ranks launch: ``plans_of_ranks[r]`` are rank r's steps, of which only the last flushes.

    ``tells_shapes``: every message sends its shape ahead.  ``synchronized_between``: so is the device between
    two steps.
    """
    shape = (1,) * (DIMENSIONS if tells_shapes else 1)
    output = torch.zeros(shape)
    launched = []
    for rank, steps in enumerate(plans_of_ranks):
        recording = Recording(sends_look_done)
        groups: Any = [RecordingGroup(name, recording, shape) for name in ("down", "up")]
        with patch.multiple(
            dist,
            get_rank=lambda here=rank: here,
            get_group_rank=lambda group, global_rank: global_rank,
            get_backend=lambda group: "nccl",
        ):
            channels = Channels(
                list(range(len(plans_of_ranks))),
                *groups,
                () if tells_shapes else shape,
                output.dtype,
                output.device,
            )
        stages = {step.action.stage for plan in steps for step in plan.steps}
        kernels: Any = {stage: NamedKernels(stage, recording, output, seconds) for stage in stages}
        for number, plan in enumerate(steps):
            if number and synchronized_between:
                recording.add(HostWait())
            execute(plan, kernels, channels, flush=number + 1 == len(steps))
        launched.append(tuple(recording.entries))
    return tuple(launched)
