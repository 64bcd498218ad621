"""Hundreds of steps leave nothing behind: no activation, no stash, no version, no buffer, no memory."""

import gc
import mmap
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.pipedream.flush_free import VersionedStage, WeightVersions
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.plan import plan_orders, plan_rank
from megatron_pp_ext.runtime.rank import Rank, Stage
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from tests.support.module_stage import ModuleStage
from tests.support.ranks import run_ranks
from tests.support.split_linear import SplitLinear

RANKS, MICROBATCHES, STEPS, WARM_UP = 2, 2, 500, 100
ROWS, WIDTH = 64, 64
MESSAGE_BYTES = 4 * ROWS * WIDTH
HALF = (STEPS - WARM_UP) // 2
UNDER_WAY = WARM_UP // 2, WARM_UP - 10
NOISE = HALF * MESSAGE_BYTES // 2
"""What an allocator may keep for itself: half of what a message a step would come to."""


class Forgetful(ModuleStage):
    """Keeps its last input of every step, and as many bytes that are no tensor."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[object] = []

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        activation, _ = self._in_flight[microbatch]
        if microbatch == MICROBATCHES - 1:
            # Not from the heap, on which the process may have room from before; private, since what is
            # shared is not counted.
            memory = mmap.mmap(-1, MESSAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.write(b"x" * MESSAGE_BYTES)
            self.kept += [activation, memory]
        return super().backward(microbatch, gradient)


def stages_of(rank: int, make: type[ModuleStage], chunks: tuple[int, ...], stages: int) -> dict[int, Stage]:
    def module(stage: int) -> torch.nn.Module:
        torch.manual_seed(stage)
        return torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), SplitLinear(WIDTH, WIDTH), torch.nn.GELU())

    return {
        stage: make(
            stage,
            module(stage),
            first_inputs=(lambda _: torch.ones(ROWS, WIDTH)) if stage == 0 else None,
            loss=(lambda output, _: output.square().mean()) if stage == stages - 1 else None,
        )
        for stage in chunks
    }


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def take_steps(rank: int, name: str, make: type[ModuleStage]) -> dict[str, int]:
    """Take all steps, and tell what is more after them than after the warm-up."""
    dist.init_process_group("gloo")
    pipeline = list(range(RANKS))
    is_pipedream = name == "pipedream"
    schedule = catalog.build("1f1b" if is_pipedream else name, RANKS, MICROBATCHES)
    placement = schedule.placement
    stages = stages_of(rank, make, placement.stages_of(rank), placement.stages)
    parameters = [p for stage in stages.values() for p in stage.module.parameters()]
    groups = direction_groups(pipeline)
    channels = Channels(pipeline, *groups, (ROWS, WIDTH), torch.float, torch.device("cpu"))
    recorder = StepRecorder(parameters)
    versions = WeightVersions(parameters) if is_pipedream else None
    take = partial(_flush, plan_rank(schedule, rank), stages, channels, recorder)
    if versions is not None:
        take = partial(_never_flush, rank, stages[rank], versions, channels, recorder)
    optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)
    under_way: list[int] = []

    def steps(first: int, last: int, take: Callable[[int], None]) -> tuple[int, int]:
        for step in range(first, last):
            optimizer.zero_grad()
            recorder.forget()
            take(step)
            optimizer.step()
            if step in UNDER_WAY:
                under_way.append(tensors_alive())
        alive = tensors_alive()
        memory = psutil.Process().memory_info()
        return alive, memory.rss - memory.shared  # without the libraries' code, read when it is first run

    tensors, *sizes = steps(0, WARM_UP, take)
    sizes += steps(WARM_UP, WARM_UP + HALF, take)[1:]
    more_tensors, *size = steps(WARM_UP + HALF, STEPS, take)
    return {
        "tensors": more_tensors - tensors,
        "tensors while microbatches are in flight": under_way[1] - under_way[0],
        # What leaks does so in both halves; an allocator takes what it wants once.
        "resident": min(after - before for before, after in pairwise([*sizes, *size])),
        "activations": recorder.meter.live_bytes,
        "stash": len(STORE),
        "versions": versions.kept_bytes if versions else 0,
    }


def _flush(plan, stages, channels, recorder, step: int) -> None:
    with recorder.step():
        execute(plan, Rank(stages, channels, recorder))


def _never_flush(rank: int, stage, versions, channels, recorder, step: int) -> None:
    replicas = Replicas.straight(RANKS)
    about = {"stage": rank, "replicas": replicas, "interval": MICROBATCHES}
    weights = pipedream.WeightVersion.PREVIOUS
    versioned = VersionedStage(stage, versions, partial(pipedream.version, weights, **about))
    # Every hundred steps the pipeline runs empty: what is left then is left for ever.
    done, total = step % WARM_UP, WARM_UP
    ends = done == total - 1
    if done == 0:
        versions.newest = 0
    orders = pipedream.step(replicas, MICROBATCHES, done, total)
    plan = plan_orders(replicas.placed(orders), rank, flushes=ends)
    with recorder.step():
        execute(plan, Rank({rank: versioned}, channels, recorder))
    kept = () if ends else pipedream.versions_kept(weights, done + 1, **about)
    versions.update_follows(kept)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["v-half", "pipedream"])
def test_nothing_is_left(name: str) -> None:
    for left in run_ranks(take_steps, RANKS, name, ModuleStage):
        assert left.pop("resident") < NOISE
        assert set(left.values()) == {0}, left


@pytest.mark.wide
def test_what_a_stage_kept_would_be_seen() -> None:
    """A tensor and as many bytes a step: both checks see what they are for."""
    for left in run_ranks(take_steps, RANKS, "zb-h1", Forgetful):
        assert left["tensors"] >= STEPS - WARM_UP
        assert left["resident"] > NOISE
