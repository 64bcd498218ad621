"""One rank on a GPU whose activations wait on the host: its step, its peak memory, and its gradients.

python -m benchmarks.gpu.away v-half [--dry]
"""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.layers import Block
from megatron_pp_ext.runtime.activations_away import ActivationsAway
from megatron_pp_ext.runtime.copy_streams import CopyStreams
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.host_buffers import HostBuffers
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from tests.support.away import everything, half, with_away
from tests.support.module_stage import ModuleStage
from tests.support.split_linear import SplitLinear

HIDDEN, TOKENS = 16384, 1024
"""Products are so large that a copy of what a forward keeps takes about as long as the forward."""

RANK, RANKS, MICROBATCHES = 1, 4, 8
STEPS = 5
ROWS = 64
"""The rows of every gradient that are compared: each is a sum over all tokens of all microbatches."""

HOST_BYTES = 40 * 2**30
SMALLEST = 2**20


def away(name: str, hidden: int, tokens: int) -> dict[str, object]:
    """Return the milliseconds and the peak of steps of rank 1 of 4, with made-up neighbours.

    RuntimeError if gradients are not the same to the last bit with activations on the host, or none moved.
    """
    schedule = catalog.build(name, RANKS, MICROBATCHES)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    try:
        return _measured(schedule, hidden, tokens)
    finally:
        dist.destroy_process_group()


def _measured(schedule: Schedule, hidden: int, tokens: int) -> dict[str, object]:
    group, everyone = dist.group.WORLD, list(range(RANKS))
    assert group is not None
    torch.manual_seed(0)

    def module() -> torch.nn.Module:
        with torch.device("cuda"):
            blocks = torch.nn.Sequential(Block(hidden, SplitLinear), Block(hidden, SplitLinear))
        return blocks.to(dtype=torch.bfloat16)

    stages = {stage: ModuleStage(stage, module()) for stage in schedule.placement.stages_of(RANK)}
    parameters = [one for stage in stages.values() for one in stage.module.parameters()]
    channels = (everyone, group, group, (tokens, hidden), torch.bfloat16, torch.device("cuda"))
    smallest = SMALLEST if hidden == HIDDEN else 1
    found: dict[str, object] = {"hidden": hidden, "tokens": tokens}
    expected: list[torch.Tensor] = []
    for what, leaves in (("none", None), ("half", half), ("all", everything)):
        plan = plan_rank(schedule if leaves is None else with_away(schedule, leaves), RANK)
        moved = ActivationsAway(HostBuffers(HOST_BYTES), CopyStreams(), smallest)

        def step(plan=plan, moved=moved) -> None:  # type: ignore[no-untyped-def]
            for parameter in parameters:
                parameter.grad = None
            torch.manual_seed(1)
            execute(plan, Rank(stages, MadeUpChannels(*channels), away=moved))
            torch.cuda.synchronize()

        step()
        torch.cuda.reset_peak_memory_stats()
        found[f"{what} away: ms"] = f"{1e3 * median(_seconds(step) for _ in range(STEPS)):.1f}"
        found[f"{what} away: peak GiB"] = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}"
        gradients = [parameter.grad[:ROWS].cpu() for parameter in parameters]
        expected = expected or gradients
        if not all(map(torch.equal, gradients, expected)):
            raise RuntimeError(f"gradients differ with {what} of the activations on the host")
        if bool(moved.sent_bytes) == (leaves is None):
            raise RuntimeError(f"{moved.sent_bytes} bytes moved with {what} of the activations on the host")
        found[f"{what} away: GiB moved a step"] = f"{moved.sent_bytes / (STEPS + 1) / 2**30:.2f}"
    return found


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main(
    name: Annotated[str, typer.Argument(help="The schedule.")],
    dry: Annotated[bool, typer.Option("--dry", help="Small, on CPUs that stand in for a GPU.")] = False,
) -> None:
    """Print one row as JSON."""
    hidden, tokens = HIDDEN, TOKENS
    if dry:
        from megatron_pp_ext import cpu

        cpu.install()
        hidden, tokens = 64, 16
    print(json.dumps(away(name, hidden, tokens)))


if __name__ == "__main__":
    typer.run(main)
