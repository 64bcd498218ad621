"""Stages that sleep for a unit's time and keep its bytes, to hold plans of units against steps.

A message has a number for each of its unit's tokens.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import UnitCosts
from tests.support.module_stage import ModuleStage


class _Work(torch.autograd.Function):
    """Keeps a unit's bytes; its I gives back a part of them, and its W the rest."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, layer: "UnitLayer", unit: int) -> torch.Tensor:
        begin = time.perf_counter()
        stage_costs = layer.costs.units[unit].stages[layer.stage]
        ctx.layer, ctx.one = layer, stage_costs
        sizes = (
            stage_costs.released_by_input_gradient,
            stage_costs.activation - stage_costs.released_by_input_gradient,
        )
        ctx.save_for_backward(*(torch.empty(round(size), dtype=torch.uint8) for size in sizes))
        layer.sleep(begin, stage_costs.seconds(Kind.F))
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        begin, layer, stage_costs = time.perf_counter(), ctx.layer, ctx.one

        def weight() -> None:
            layer.sleep(time.perf_counter(), stage_costs.seconds(Kind.W))

        layer.sleep(begin, stage_costs.seconds(Kind.I))
        STORE.defer(weight, ctx.saved_tensors[1])
        return gradients[0], None, None


class UnitLayer(torch.nn.Module):
    """A stage's layer, whose actions take ``scale`` times the ``costs`` of the ``unit`` that runs."""

    def __init__(self, stage: int, costs: UnitCosts, scale: float) -> None:
        super().__init__()
        self.stage, self.costs, self.unit, self._scale = stage, costs, 0, scale

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``activation``."""
        if not activation.requires_grad:
            activation.requires_grad_()
        result: torch.Tensor = _Work.apply(activation, self, self.unit)
        return result

    def sleep(self, begin: float, seconds: float) -> None:
        """Sleep until ``seconds``, scaled, after ``begin``."""
        if self._scale:
            time.sleep(max(0.0, begin + self._scale * seconds - time.perf_counter()))


class UnitStage(ModuleStage):
    """A stage of one ``UnitLayer``."""

    module: UnitLayer

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """See ``rank.Stage``."""
        self.module.unit = microbatch
        return super().forward(microbatch, activation)


def steps_of(
    rank: int, cases: list[tuple[Schedule, UnitCosts, float]], repeats: int
) -> list[tuple[list[float], int]]:
    """Return for each case the seconds of ``repeats`` steps, and the most bytes that this rank kept.

    A case is a schedule, its costs, and the seconds for which a rank sleeps for 1 of them.
    """
    dist.init_process_group("gloo")
    down, up = direction_groups(list(range(dist.get_world_size())))
    results = []
    for schedule, costs, scale in cases:
        last, shapes = schedule.placement.stages - 1, [(tokens, 1, 1) for tokens in costs.tokens]
        stages = {
            stage: UnitStage(
                stage,
                UnitLayer(stage, costs, scale),
                first_inputs=lambda unit, shapes=shapes: torch.zeros(shapes[unit]),
                loss=(lambda output, _: output.sum()) if stage == last else None,
            )
            for stage in schedule.placement.stages_of(rank)
        }
        plan, seconds, recorder = plan_rank(schedule, rank), [], StepRecorder()
        for number in range(repeats + 1):
            channels = Channels(
                list(range(schedule.ranks)), down, up, (), torch.float, torch.device("cpu"), shapes
            )
            dist.barrier()
            begin = time.perf_counter()
            if number:
                execute(plan, Rank(stages, channels))
                seconds.append(time.perf_counter() - begin)
            else:
                with recorder.step():
                    execute(plan, Rank(stages, channels, recorder))
        results.append((seconds, recorder.record.peak_bytes))
    return results
