"""Single layers and single ranks on a GPU: the cost of a split backward, gaps between kernels, and copies.

python -m benchmarks.gpu.layers split plain [--dry]
python -m benchmarks.gpu.layers gaps v-half [--dry]
python -m benchmarks.gpu.layers copies products [--dry]
"""

import json
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring import in_turns
from megatron_pp_ext.calibration.measure import HOST_BYTES, copies_both_ways
from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from tests.support.module_stage import ModuleStage
from tests.support.split_linear import SplitLinear

HIDDEN = 4096
REPEATS = 20
REPEATED = 8
"""Products in a row, which take less time than the copies beside them."""

LONGEST_GAP = 20.0
"""The microseconds from which on a gap counts."""

HEAD_START = 20_000_000
"""The device's cycles, some ten milliseconds, for which it waits while the host launches a step."""

SHOWN_GAPS, SHOWN = 3, 40
"""The gaps that a table shows, and the characters of a kernel's name."""

GOAL = 1.02


class Block(torch.nn.Module):
    """The feed-forward part of a transformer layer."""

    def __init__(self, hidden: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same shape."""
        return input + self.down(torch.nn.functional.gelu(self.up(self.norm(input))))


class EngineBlock(torch.nn.Module):
    """A ``Block`` of Transformer Engine's layers, which add weight gradients into main_grad."""

    def __init__(self, hidden: int, splits: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as engine

        from megatron_pp_ext.integration.core.engine_linear import split_backwards

        about: dict[str, Any] = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
        self.up = engine.LayerNormLinear(hidden, 4 * hidden, **about)
        self.down = engine.Linear(4 * hidden, hidden, **about)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        if splits:
            split_backwards([self])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same shape."""
        return input + self.down(torch.nn.functional.gelu(self.up(input)))


def whole(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run autograd's backward."""
    torch.autograd.backward(output, grad_tensors=gradient)


def in_halves(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run I, then W."""
    slot = Owner(0, 0)
    with STORE.collecting(slot):
        whole(output, gradient)
    STORE.run(slot)


def split(kind: str, hidden: int) -> dict[str, object]:
    """Return what I and W cost one after the other, against a whole backward."""
    makers: dict[str, Callable[[bool], torch.nn.Module]] = {
        "plain": lambda splits: Block(hidden, SplitLinear if splits else torch.nn.Linear),
        "transformer-engine": partial(EngineBlock, hidden),
    }
    if kind == "transformer-engine" and find_spec("transformer_engine") is None:
        return {"goal": "not installed"}
    x = torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones_like(x)
    ways = {}
    for splits, backward in ((False, whole), (True, in_halves)):
        module = makers[kind](splits).to(device="cuda", dtype=torch.bfloat16)
        ways[splits] = partial(_seconds, module, x, partial(backward, gradient=gradient))
    times = in_turns(ways, rounds=REPEATS, warm_up=1)
    (base, least_base), (cut, least) = ((median(found), min(found)) for found in times.values())
    return {
        "hidden, tokens": hidden,
        "whole ms": f"{1e3 * base:.3f}",
        "I + W ms": f"{1e3 * cut:.3f}",
        "median ratio": f"{cut / base:.4f}",
        "least ratio": f"{least / least_base:.4f}",
        "goal": "met" if cut / base <= GOAL else f"not met: {GOAL}",
    }


def _seconds(module: torch.nn.Module, input: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> float:
    """Return the seconds of ``backward`` on the device, after a forward and without earlier gradients."""
    output = module(input)
    for one in (input, *module.parameters()):
        one.grad = None
    torch.cuda.synchronize()
    start = time.perf_counter()
    backward(output)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def gaps(name: str, hidden: int, kernels: torch.autograd.DeviceType) -> dict[str, object]:
    """Return the gaps between ``kernels`` of rank 1 of 4, with made-up neighbours."""
    ranks, microbatches = 4, 8
    schedule = catalog.build(name, ranks, microbatches)
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        work = _work(schedule, hidden, kernels)
    finally:
        dist.destroy_process_group()
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


class Kernel(NamedTuple):
    """What the device ran, and when it started and ended, in microseconds."""

    start: float
    end: float
    name: str


def _work(schedule: Schedule, hidden: int, kernels: torch.autograd.DeviceType) -> list[Kernel]:
    """Return the kernels of a step in the order of their starts.

    The steps before it load modules, and set the profiler's buffers up, which stops the device.  A kernel
    that only waits goes before the step, as an optimizer's do in training, so that the host is ahead.
    """
    group, everyone = dist.group.WORLD, list(range(schedule.placement.ranks))
    assert group is not None

    def module() -> torch.nn.Module:
        blocks = torch.nn.Sequential(Block(hidden, SplitLinear), Block(hidden, SplitLinear))
        return blocks.to(device="cuda", dtype=torch.bfloat16)

    stages = {stage: ModuleStage(stage, module()) for stage in schedule.placement.stages_of(1)}
    channels = (everyone, group, group, (hidden, hidden), torch.bfloat16, torch.device("cuda"))

    is_gpu = kernels is torch.autograd.DeviceType.CUDA

    def step() -> None:
        if is_gpu:
            torch.cuda._sleep(HEAD_START)
        execute(plan_rank(schedule, 1), Rank(stages, MadeUpChannels(*channels)))
        torch.cuda.synchronize()

    step()
    activity = getattr(torch.profiler.ProfilerActivity, kernels.name)
    phases = torch.profiler.schedule(wait=0, warmup=2, active=1, repeat=1)
    with torch.profiler.profile(activities=[activity], schedule=phases) as profile:
        for _ in range(3):
            step()
            profile.step()
    found = sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name[:SHOWN])
        for event in profile.events()
        if event.device_type == kernels and not event.name.startswith("ProfilerStep")
    )
    return found[is_gpu:]


def copies(what: str, hidden: int) -> dict[str, object]:
    """Return what products take beside copies to the host and back, against what they take alone.

    The copies go on all the time, as they would where every activation is offloaded.
    """
    if what == "products":
        left, right = (torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def work() -> object:
            return torch.mm(left, right)
    else:
        numbers = torch.randn(hidden, 4 * hidden, device="cuda", dtype=torch.bfloat16)

        def work() -> object:
            return torch.nn.functional.gelu(numbers)

    start = copies_both_ways(HOST_BYTES if hidden == HIDDEN else hidden, torch.device("cuda"))

    def seconds(beside: bool) -> float:
        torch.cuda.synchronize()
        if beside:
            start()
        before = time.perf_counter()
        for _ in range(REPEATED):
            work()
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - before

    ways: dict[bool, Callable[[], float]] = {beside: partial(seconds, beside) for beside in (False, True)}
    alone, beside = (median(found) for found in in_turns(ways, rounds=REPEATS, warm_up=2).values())
    return {
        "hidden, tokens": hidden,
        "alone ms": f"{1e3 * alone / REPEATED:.4f}",
        "beside copies ms": f"{1e3 * beside / REPEATED:.4f}",
        "ratio": f"{beside / alone:.4f}",
    }


def main(
    what: Annotated[str, typer.Argument(help="split, gaps or copies.")],
    name: Annotated[str, typer.Argument(help="The kind of layers, or the schedule.")],
    dry: Annotated[bool, typer.Option("--dry", help="Small, on CPUs that stand in for a GPU.")] = False,
) -> None:
    """Print one row as JSON."""
    hidden, kernels = HIDDEN, torch.autograd.DeviceType.CUDA
    if dry:
        from megatron_pp_ext import cpu

        cpu.install()
        hidden, kernels = 64, torch.autograd.DeviceType.CPU
    ways = {"split": split, "gaps": partial(gaps, kernels=kernels), "copies": copies}
    print(json.dumps(ways[what](name, hidden)))


if __name__ == "__main__":
    typer.run(main)
