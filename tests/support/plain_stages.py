"""A small model on plain torch stages: a stage of it on a rank, and the same gradients in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.schedule.actions import Schedule
from tests.support.module_stage import ModuleStage
from tests.support.ranks import run_ranks
from tests.support.split_linear import SplitLinear

WIDTH, ROWS = 6, 3

Loss = Callable[[torch.Tensor, int], torch.Tensor]
"""From the last stage's output and the microbatch to a scalar."""


def make_module(stage: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    layer = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), SplitLinear(WIDTH, WIDTH), torch.nn.GELU())
    return layer.double()


def microbatch_data(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.double)


def loss(output: torch.Tensor, microbatch: int) -> torch.Tensor:
    return (output * (microbatch + 1)).square().mean()


def make_stage(number: int, stages: int, loss: Loss = loss) -> ModuleStage:
    """Return stage ``number``: the first one reads the microbatches, the last of ``stages`` has the loss."""
    return ModuleStage(
        number,
        make_module(number),
        first_inputs=microbatch_data if number == 0 else None,
        loss=loss if number == stages - 1 else None,
    )


def make_channels(ranks: int) -> Channels:
    """Return the channels of this rank in a pipeline of all ranks."""
    pipeline = list(range(ranks))
    groups = direction_groups(pipeline)
    return Channels(pipeline, *groups, (ROWS, WIDTH), torch.double, torch.device("cpu"))


def in_one_process(stages: int, microbatches: int) -> tuple[dict[int, list[torch.Tensor]], dict[int, float]]:
    """Return the gradients of every stage and the loss of every microbatch, without a pipeline."""
    modules = [make_module(stage) for stage in range(stages)]
    losses = {}
    for microbatch in range(microbatches):
        value = loss(torch.nn.Sequential(*modules)(microbatch_data(microbatch)), microbatch)
        value.backward()
        losses[microbatch] = value.item()
    return {stage: [p.grad for p in module.parameters()] for stage, module in enumerate(modules)}, losses


def on_ranks(run: Callable[[int, Schedule], Any], schedules: Sequence[Schedule]) -> list[tuple[Any, ...]]:
    """Return the results of ``run(rank, schedule)`` by rank for each of ``schedules``, one after another."""
    by_rank = run_ranks(_run_each, schedules[0].ranks, run, schedules)
    return list(zip(*by_rank, strict=True))


def _run_each(rank: int, run: Callable[[int, Schedule], Any], schedules: Sequence[Schedule]) -> list[Any]:
    dist.init_process_group("gloo")
    results = []
    for schedule in schedules:
        try:
            results.append(run(rank, schedule))
        except BaseException as error:
            error.add_note(f"under {schedule.name}")
            raise
    return results
