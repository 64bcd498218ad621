"""Record the launches of the product's own executor, channels and plans, one rank after the other."""

import math
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_pp_ext.features.offload.runtime.host_buffers import HostBuffers, Timed
from megatron_pp_ext.features.offload.runtime.host_buffers import Transfer as Copied
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges, Rows, SharedEmbedding
from megatron_pp_ext.features.vocabulary.runtime.output import SharedOutput, SharedVocabulary
from megatron_pp_ext.runtime.channels import DIMENSIONS, Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Announced, Kind, Schedule
from tests.support.launches.entries import Collective, Copy, Entry, HostWait, Kernel, Launches, Transfer, Wait


class Recording:
    """The launches of one rank so far.

    With ``sends_look_done`` every send reports that it is done, so that the rank waits for it at once;
    otherwise no send does, and the host runs as far ahead as it may.
    """

    def __init__(self, sends_look_done: bool = False) -> None:
        self.entries: list[Entry] = []
        self.sends_look_done = sends_look_done
        self._last_on_compute: int | None = None

    def add(self, entry: Entry) -> int:
        """Launch ``entry`` and return its number."""
        if isinstance(entry, Kernel | Wait):
            self._last_on_compute = len(self.entries)
        self.entries.append(entry)
        return len(self.entries) - 1

    def stop_for_compute(self) -> None:
        """Let the host wait for the compute stream, as for a copy between its memory and the device's."""
        if self._last_on_compute is not None:
            self.add(HostWait(self._last_on_compute))


class RecordedWork:
    """A message or a copy under way; ``number`` is that of its launch."""

    def __init__(self, recording: Recording, number: int, stops_host: bool, looks_done: bool) -> None:
        self._recording, self.number = recording, number
        self._stops_host, self._looks_done = stops_host, looks_done

    def wait(self) -> bool:
        """Stop the compute stream and, for a shape, which the host reads next, the host as well."""
        wait = self._recording.add(Wait(self.number))
        if self._stops_host:
            self._recording.add(HostWait(wait))
        return True

    def synchronize(self) -> None:
        self._recording.add(HostWait(self.number))

    def is_completed(self) -> bool:
        return self._looks_done


class RecordingGroup:
    """A process group that records its messages; a rank has the same number in pipeline, group and world.

    A message that carries a shape carries ``shape``; others leave the receiver's tensor as it is.
    """

    def __init__(self, name: str, recording: Recording, shape: Sequence[int]) -> None:
        self._name, self._recording, self._shape = name, recording, torch.tensor(shape)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        is_shape = tensors[0].dtype == torch.long
        if is_shape:
            self._recording.stop_for_compute()
        return self._launch(peer, True, is_shape, False)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        is_shape = tensors[0].dtype == torch.long
        if is_shape:
            tensors[0].copy_(self._shape)
        return self._launch(peer, False, is_shape, is_shape)

    def _launch(self, peer: int, is_send: bool, is_shape: bool, stops_host: bool) -> RecordedWork:
        transfer = Transfer(self._name, peer, is_send, "shape" if is_shape else "")
        looks_done = is_send and self._recording.sends_look_done
        return RecordedWork(self._recording, self._recording.add(transfer), stops_host, looks_done)


class RecordedEngines:
    """Copies that are done at once, and recorded."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def to_host(self, transfers: Sequence[Copied], after: Iterable[Any], timed: Timed) -> RecordedWork:
        return self._launch("out", transfers, after)

    def to_device(self, transfers: Sequence[Copied], after: Iterable[Any], timed: Timed) -> RecordedWork:
        return self._launch("back", transfers, after)

    def stream(self) -> None:
        return None

    def _launch(self, way: str, transfers: Sequence[Copied], after: Iterable[Any]) -> RecordedWork:
        for source, target in transfers:
            target.copy_(source)
        number = self._recording.add(Copy(way, after=tuple(work.number for work in after)))
        return RecordedWork(self._recording, number, False, False)


class NamedKernels:
    """A ``rank.Stage`` that launches one kernel for each action; a backward needs what its forward saved."""

    def __init__(self, stage: int, recording: Recording, output: torch.Tensor) -> None:
        self._stage, self._recording, self._output = stage, recording, output
        self._saved: dict[int, torch.Tensor] = {}

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        self._saved[microbatch] = torch.ones(1, requires_grad=True).exp().sum()
        return self._launch(Kind.F, microbatch)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        self._saved.pop(microbatch).backward()
        return self._launch(Kind.B, microbatch)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        self._saved.pop(microbatch).backward()
        return self._launch(Kind.I, microbatch)

    def backward_weight(self, microbatch: int) -> None:
        self._launch(Kind.W, microbatch)

    def _launch(self, kind: Kind, microbatch: int) -> torch.Tensor:
        self._recording.add(Kernel(f"{self._stage}{kind}{microbatch}"))
        return self._output


class RecordedExchanges(Exchanges):
    """Exchanges that are recorded, and leave tensors as they are."""

    def __init__(self, recording: Recording, ranks: int) -> None:
        self._recording, self._ranks = recording, tuple(range(ranks))

    def broadcast(self, tensor: torch.Tensor, home: int) -> Any:
        return self._launch()

    def reduce(self, tensor: torch.Tensor, home: int) -> Any:
        return self._launch()

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return part.new_zeros(len(self._ranks), *part.shape), self._launch()

    def _launch(self) -> RecordedWork:
        entry = Collective("vocabulary", self._ranks, "exchange")
        return RecordedWork(self._recording, self._recording.add(entry), False, False)


class RecordedOutput(SharedOutput):
    """The product's own part of a shared output layer on tiny tensors, with a kernel for each action."""

    def __init__(self, recording: Recording, rank: int, *about: Any) -> None:
        super().__init__(*about)
        self._recording, self._rank = recording, rank

    def keep(self, microbatch: int, hidden: torch.Tensor) -> None:
        super().keep(microbatch, hidden.reshape(1, 1))

    def logits(self, microbatch: int) -> None:
        super().logits(microbatch)
        self._recording.add(Kernel(f"{self._rank}S{microbatch}"))

    def weight_gradient(self, microbatch: int) -> None:
        super().weight_gradient(microbatch)
        self._recording.add(Kernel(f"{self._rank}T{microbatch}"))


class RecordedVocabulary(SharedVocabulary):
    """The product's own part of a shared vocabulary on tiny tensors."""

    def __init__(self, recording: Recording, rank: int, plans_of_ranks: Sequence[Sequence[RankPlan]]) -> None:
        exchanges = RecordedExchanges(recording, len(plans_of_ranks))
        rows = Rows(2 * rank, 2, lambda: torch.ones(2, 1), lambda gradient: None)

        forwards = [
            (action.stage, number)
            for number, (plan, *_) in enumerate(plans_of_ranks)
            for action in plan.actions
            if action.kind is Kind.F
        ]
        (_, first), (_, last) = min(forwards, default=(0, 0)), max(forwards, default=(0, 0))
        head = _Head() if last == rank else None
        tokens = (lambda microbatch: torch.zeros(1, dtype=torch.long)) if first == rank else None
        super().__init__(
            SharedEmbedding(rows, torch.Size((1,)), torch.device("cpu"), exchanges, first, tokens),
            RecordedOutput(recording, rank, rows, torch.Size((1, 1)), exchanges, last, head),
        )


class _Head:
    """The rank of the last stage, with labels and losses of no meaning."""

    def labels(self, microbatch: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.long)

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        return losses


def plans(steps: Sequence[Schedule], announced: Announced = Announced.NOTHING) -> list[list[RankPlan]]:
    """Return the plans for ``steps``, of rank r at ``[r]``; only the last step flushes."""
    ends = [*(False for _ in steps[1:]), True]
    return [
        [plan_rank(schedule, rank, flushes, announced) for schedule, flushes in zip(steps, ends, strict=True)]
        for rank in range(steps[0].ranks)
    ]


def record(steps: Sequence[Schedule], **options: Any) -> tuple[Launches, ...]:
    """Return the launches of all ranks in ``steps``; see ``plans`` and ``record_plans``."""
    return record_plans(plans(steps), **options)


def record_plans(
    plans_of_ranks: Sequence[Sequence[RankPlan]],
    *,
    sends_shapes: bool = False,
    sends_look_done: bool = False,
    has_one_shape: bool = False,
    synchronized_between: bool = False,
    reduced_between: Sequence[Sequence[int]] = (),
) -> tuple[Launches, ...]:
    """Return the launches of all ranks; ``plans_of_ranks[r]`` are the steps of rank r.

    With ``sends_shapes`` every activation sends its shape ahead, but for those that repeat one where each
    microbatch ``has_one_shape``.  With ``synchronized_between`` the device is
    synchronized between two steps.  Behind every step each of the groups ``reduced_between`` has a
    collective.
    """
    shape = (1,) * (DIMENSIONS if sends_shapes else 1)
    output = torch.zeros(shape)
    launched = []
    for rank, steps in enumerate(plans_of_ranks):
        recording = Recording(sends_look_done)
        groups: Any = [RecordingGroup(name, recording, shape) for name in ("down", "up")]
        vocabulary = RecordedVocabulary(recording, rank, plans_of_ranks)
        away = OffloadedActivations(HostBuffers(math.inf), RecordedEngines(recording), smallest=1)
        with patch.multiple(
            dist,
            get_rank=lambda number_of_rank=rank: number_of_rank,
            get_group_rank=lambda group, global_rank: global_rank,
            get_backend=lambda group: "nccl",
        ):
            channels = Channels(
                list(range(len(plans_of_ranks))),
                *groups,
                () if sends_shapes else shape,
                output.dtype,
                output.device,
                has_one_shape=has_one_shape,
            )
            stages = {action.stage for plan in steps for action in plan.actions}
            kernels: Any = {stage: NamedKernels(stage, recording, output) for stage in stages}
            for number, plan in enumerate(steps):
                if number and synchronized_between:
                    recording.add(HostWait())
                execute(plan, Rank(kernels, channels, parts=[part for part in (vocabulary, away) if part]))
                for ranks in reduced_between:
                    if rank in ranks:
                        recording.add(Collective(str(ranks), tuple(ranks), "gradients", is_waited_for=True))
        launched.append(tuple(recording.entries))
    return tuple(launched)
