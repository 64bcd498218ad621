"""One rank of four on a GPU, with made-up neighbours: gaps between kernels, activations on the host."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pp_ext.features.offload.runtime.host_buffers import CopyStreams, HostBuffers
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.runtime.channels import DummyChannels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from tests.support.module_stage import ModuleStage
from tests.support.offloaded import everything, half, with_offloaded
from tests.support.split_linear import SplitLinear

RANK, RANKS, MICROBATCHES = 1, 4, 8

LONGEST_GAP = 20.0
"""The microseconds from which on a gap counts."""

HEAD_START = 20_000_000
"""The device's cycles, some ten milliseconds, for which it waits while the host launches a step."""

SHOWN_GAPS, SHOWN = 3, 40
"""The gaps that a table shows, and the characters of a kernel's name."""

WIDE, TOKENS = 16384, 1024
"""Products are so large that a copy of a forward's activations takes about as long as the forward."""

STEPS = 5
ROWS = 64
"""The rows of every gradient that are compared: each is a sum over all tokens of all microbatches."""

HOST_BYTES = 40 * 2**30
SMALLEST = 2**20


class Block(torch.nn.Module):
    """The feed-forward part of a transformer layer."""

    def __init__(self, hidden: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same shape."""
        return input + self.down(torch.nn.functional.gelu(self.up(self.norm(input))))


class OneRank:
    """The stages of a rank of ``schedule``, two blocks each, which run a step with made-up neighbours."""

    def __init__(self, schedule: Schedule, hidden: int, tokens: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.schedule = schedule
        self._stages = {
            stage: ModuleStage(stage, _blocks(hidden)) for stage in schedule.placement.stages_of(RANK)
        }
        sizes = (tokens, hidden), torch.bfloat16, torch.device("cuda")
        self._channels = (list(range(RANKS)), group, group, *sizes)

    @property
    def parameters(self) -> list[Any]:
        """The parameters of all stages."""
        return [parameter for stage in self._stages.values() for parameter in stage.module.parameters()]

    def run(self, schedule: Schedule | None = None, away: OffloadedActivations | None = None) -> None:
        """Run a step, of the same orders with copies if ``schedule`` has them, and wait for the device."""
        plan = plan_rank(schedule or self.schedule, RANK)
        execute(plan, Rank(self._stages, DummyChannels(*self._channels), parts=[away] if away else []))
        torch.cuda.synchronize()


def _blocks(hidden: int) -> torch.nn.Module:
    with torch.device("cuda"):
        return torch.nn.Sequential(Block(hidden, SplitLinear), Block(hidden, SplitLinear)).bfloat16()


@contextmanager
def one_rank(name: str, hidden: int, tokens: int) -> Iterator[OneRank]:
    """Make a rank of the schedule ``name``, in a process group that is made up as well."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    try:
        yield OneRank(catalog.build(name, RANKS, MICROBATCHES), hidden, tokens)
    finally:
        dist.destroy_process_group()


class Kernel(NamedTuple):
    """A kernel of the device, and when it started and ended, in microseconds."""

    start: float
    end: float
    name: str


def gaps(name: str, hidden: int, kernels: torch.autograd.DeviceType) -> dict[str, object]:
    """Return the gaps between ``kernels`` of a step."""
    with one_rank(name, hidden, hidden) as rank:
        work = _work(rank, kernels)
    between = [after.start - before.end for before, after in pairwise(work)]
    longest = sorted(enumerate(between, 1), key=lambda gap: -gap[1])
    long = sum(gap > LONGEST_GAP for gap in between)
    return {
        "hidden, tokens": hidden,
        "kernels": len(work),
        "median gap us": f"{median(between):.1f}",
        "longest us, before kernel": ", ".join(
            f"{gap:.1f} {place} ({work[place].name})" for place, gap in longest[:SHOWN_GAPS]
        ),
        f"over {LONGEST_GAP:.0f} us": long,
        "goal: none": "not met" if long else "met",
    }


def _work(rank: OneRank, kernels: torch.autograd.DeviceType) -> list[Kernel]:
    """Return the kernels of a step in the order of their starts.

    The steps before it load modules, and set the profiler's buffers up, which stops the device.  A kernel
    that only waits goes before the step, as an optimizer's do in training, so that the host is ahead.
    """
    is_gpu = kernels is torch.autograd.DeviceType.CUDA

    def step() -> None:
        if is_gpu:
            torch.cuda._sleep(HEAD_START)
        rank.run()

    step()
    activity = getattr(torch.profiler.ProfilerActivity, kernels.name)
    phases = torch.profiler.schedule(wait=0, warmup=2, active=1, repeat=1)
    with torch.profiler.profile(activities=[activity], schedule=phases) as profile:
        for _ in range(3):
            step()
            profile.step()
    kernels_of_step = sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name[:SHOWN])
        for event in profile.events()
        if event.device_type == kernels and not event.name.startswith("ProfilerStep")
    )
    return kernels_of_step[is_gpu:]


def away(name: str, hidden: int, tokens: int) -> dict[str, object]:
    """Return the milliseconds and the peak of steps with none, half and all activations on the host.

    RuntimeError if gradients are not the same to the last bit with activations on the host, or none moved.
    """
    torch.manual_seed(0)
    with one_rank(name, hidden, tokens) as rank:
        return _with_copies(rank, SMALLEST if hidden == WIDE else 1, {"hidden": hidden, "tokens": tokens})


def _with_copies(rank: OneRank, smallest: int, cells: dict[str, object]) -> dict[str, object]:
    expected: list[torch.Tensor] = []
    for part, leaves in (("none", None), ("half", half), ("all", everything)):
        schedule = rank.schedule if leaves is None else with_offloaded(rank.schedule, leaves)
        moved = OffloadedActivations(HostBuffers(HOST_BYTES), CopyStreams(), smallest)

        def step(schedule=schedule, moved=moved) -> None:  # type: ignore[no-untyped-def]
            for parameter in rank.parameters:
                parameter.grad = None
            torch.manual_seed(1)
            rank.run(schedule, moved)

        step()
        torch.cuda.reset_peak_memory_stats()
        cells[f"{part} away: ms"] = f"{1e3 * median(_seconds(step) for _ in range(STEPS)):.1f}"
        cells[f"{part} away: peak GiB"] = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}"
        gradients = [parameter.grad[:ROWS].cpu() for parameter in rank.parameters]
        expected = expected or gradients
        if not all(map(torch.equal, gradients, expected)):
            raise RuntimeError(f"gradients differ with {part} of the activations on the host")
        if bool(moved.offloaded_bytes) == (leaves is None):
            raise RuntimeError(
                f"{moved.offloaded_bytes} bytes moved with {part} of the activations on the host"
            )
        cells[f"{part} away: GiB moved a step"] = f"{moved.offloaded_bytes / (STEPS + 1) / 2**30:.2f}"
    return cells


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
