"""Single layers and single ranks on a GPU: the cost of a split backward, and gaps between kernels."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.measuring import in_turns
from benchmarks.report import Row, table
from benchmarks.runtime.split import Backward, Block, Stage, ours, whole
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.module_stage import ModuleStage
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.split import SplitLinear
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import catalog

HIDDEN = TOKENS = 4096
REPEATS = 20
LONGEST_GAP = 20e-6
GOAL = 1.02


class EngineBlock(torch.nn.Module):
    """A ``Block`` of Transformer Engine's layers, which add weight gradients into main_grad."""

    def __init__(self, hidden: int, splits: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as engine

        from megatron_pp_ext.integration.hooks.engine_linear import split_backwards

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


def _device(bench: Bench) -> tuple[torch.device, torch.dtype, int]:
    """Return device, dtype and hidden size."""
    if bench.dry:
        return torch.device("cpu"), torch.float32, 64
    return torch.device("cuda"), torch.bfloat16, HIDDEN


def split(bench: Bench) -> str:
    """Return a table of I and W one after the other against a whole backward."""
    device, dtype, hidden = _device(bench)
    shape = (hidden if bench.dry else TOKENS, hidden)
    kinds: dict[str, Callable[[bool], torch.nn.Module]] = {
        "plain": lambda splits: Block(hidden, SplitLinear if splits else torch.nn.Linear),
    }
    rows: list[Row] = []
    try:
        import transformer_engine.pytorch  # noqa: F401

        kinds["Transformer Engine"] = partial(EngineBlock, hidden)
    except ImportError:
        rows.append(("Transformer Engine", "not installed", "", "", "", ""))
    for name, make in kinds.items():
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.ones_like(x)
        ways = {}
        for splits, backward in ((False, whole), (True, ours)):
            stage = Stage(make(splits).to(device=device, dtype=dtype), x, gradient)
            ways[splits] = partial(_seconds, stage, backward)
        times = in_turns(ways, rounds=REPEATS, warm_up=1)
        (base, least_base), (cut, least) = ((median(found), min(found)) for found in times.values())
        met = "met" if cut / base <= GOAL else f"goal {GOAL}"
        milliseconds = f"{1e3 * base:.3f}", f"{1e3 * cut:.3f}"
        rows.append((name, *milliseconds, f"{cut / base:.4f}", f"{least / least_base:.4f}", met))
    head = ("layers", "whole ms", "I + W ms", "median ratio", "least ratio", "goal")
    return f"## A cut backward, hidden {hidden}, {shape[0]} tokens\n\n{table(head, rows)}"


def _seconds(stage: Stage, backward: Backward) -> float:
    """Return the seconds of ``backward`` on the device, after a forward and without earlier gradients."""
    output = stage.module(stage.input)
    for one in (stage.input, *stage.module.parameters()):
        one.grad = None
    _wait(stage.input.device)
    start = time.perf_counter()
    backward(stage, output)
    _wait(stage.input.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gaps(bench: Bench) -> str:
    """Return a table of the gaps between kernels of one rank, with made-up neighbours."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device, dtype, hidden = _device(bench)
    ranks, microbatches = 4, 8
    schedule = catalog.build("v-half", ranks, microbatches)
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        group, everyone = dist.group.WORLD, list(range(ranks))
        assert group is not None

        def module() -> torch.nn.Module:
            blocks = torch.nn.Sequential(Block(hidden, SplitLinear), Block(hidden, SplitLinear))
            return blocks.to(device=device, dtype=dtype)

        stages = {stage: ModuleStage(stage, module()) for stage in schedule.placement.stages_of(1)}
        shape = (hidden if bench.dry else TOKENS, hidden)

        def step() -> None:
            execute(
                plan_rank(schedule, 1), stages, MadeUpChannels(everyone, group, group, shape, dtype, device)
            )

        step()
        _wait(device)
        with _profile(device) as profile:
            step()
            _wait(device)
        if profile is None:
            return "## Gaps\n\nthere is no device to profile"
        work = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
    finally:
        dist.destroy_process_group()
    between = sorted((after[0] - before[1]) / 1e6 for before, after in pairwise(work))
    long = sum(gap > LONGEST_GAP for gap in between)
    microseconds = (f"{1e6 * gap:.1f}" for gap in (median(between), between[-1]))
    rows: list[Row] = [(len(work), *microseconds, long, "not met" if long else "met")]
    head = ("kernels", "median gap us", "longest gap us", f"over {1e6 * LONGEST_GAP:.0f} us", "goal: none")
    return f"## Gaps between kernels, rank 1 of v-half, p = {ranks}, hidden {hidden}\n\n{table(head, rows)}"


def _profile(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
