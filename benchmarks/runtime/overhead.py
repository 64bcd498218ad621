"""How much Python runs between two actions: plans, messages' bookkeeping, the loop?

    python -m benchmarks.runtime.overhead

One rank of a pipeline runs with stages that do nothing and messages that are made up, so that nothing is left
but Python.  Writes results/overhead.md.
"""

import time
from functools import partial
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring import in_turns
from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.rank import Rank, Unrecorded
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import catalog

RANKS, MICROBATCHES, RANK = 8, 64, 3
FAMILIES = ("1f1b", "zb-h1", "interleaved", "v-half", "v-zb")
GOAL = 30e-6


class IdleStage:
    """A ``runtime.rank.Stage`` that returns one and the same tensor."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(1)

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor."""
        return self._tensor

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor."""
        return self._tensor

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None:
        """Do nothing."""


def seconds_of_an_action(
    plan: RankPlan, stages: dict[int, IdleStage], group: dist.ProcessGroup, recorder: StepRecorder | None
) -> float:
    """Run one step, and return its seconds over its actions."""
    channels = MadeUpChannels(list(range(RANKS)), group, group, (1,), torch.float, torch.device("cpu"))
    if recorder is not None:
        recorder.forget()
    start = time.perf_counter()
    execute(plan, Rank(stages, channels, recorder or Unrecorded()))
    return (time.perf_counter() - start) / len(plan.actions)


def main(
    out: Out = RESULTS / "overhead.md",
    repeats: Annotated[int, typer.Option(help="Steps of each schedule that count.")] = 50,
) -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    recorder = StepRecorder()
    rows: list[Row] = []
    for family in FAMILIES:
        schedule = catalog.build(family, RANKS, MICROBATCHES)
        stages = dict.fromkeys(schedule.placement.stages_of(RANK), IdleStage())
        start = time.perf_counter()
        plan = plan_rank(schedule, RANK)
        planning = time.perf_counter() - start

        one_step = partial(seconds_of_an_action, plan, stages, group)
        times = in_turns({"quiet": partial(one_step, None), "recorded": partial(one_step, recorder)}, repeats)
        met = "met" if median(times["quiet"]) <= GOAL else f"goal {1e6 * GOAL:.0f}"
        taken = (f"{1e6 * of(found):.1f}" for found in times.values() for of in (median, min))
        rows.append((family, len(plan.actions), *taken, f"{1e3 * planning:.1f}", met))
    head = (
        "schedule", "actions", "us an action, median", "least", "recorded, median", "least",
        "ms to plan, once", "goal",
    )  # fmt: skip
    about = (
        f"Rank {RANK} of {RANKS}, m = {MICROBATCHES}, {repeats} steps; nothing is computed and nothing is "
        "sent."
    )
    publish(out, "Python between actions", about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
