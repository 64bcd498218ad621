"""What the executor itself takes for an action: plans, messages' bookkeeping, the loop.

    python benchmarks/overhead.py

One rank of a pipeline runs with stages that do nothing and messages that are made up, so that nothing is left
but Python.  Writes results/overhead.md.
"""

import platform
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import typer
from tables import table
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels
from megatron_pp_ext.schedule import catalog

RESULTS = Path(__file__).parent / "results" / "overhead.md"
RANKS, MICROBATCHES, RANK, REPEATS = 8, 64, 3, 50
FAMILIES = ("1f1b", "zb-h1", "interleaved", "v-half", "v-zb")
GOAL = 30e-6


class Idle:
    """A stage that hands on one and the same tensor."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(1)

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """See ``executor.Stage``, as all below."""
        return self._tensor

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Nothing."""
        return self._tensor

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Nothing."""
        return self._tensor

    def backward_weight(self, microbatch: int) -> None:
        """Nothing."""


def main() -> None:
    """Measure and write the table."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    group, everyone = dist.group.WORLD, list(range(RANKS))
    assert group is not None
    rows = []
    for family in FAMILIES:
        schedule = catalog.build(family, RANKS, MICROBATCHES)
        stages = dict.fromkeys(schedule.placement.stages_of(RANK), Idle())
        start = time.perf_counter()
        plan = plan_rank(schedule, RANK)
        planning = time.perf_counter() - start
        quiet, recorded = [], []
        recorder = StepRecorder()
        for _ in range(REPEATS):
            for times, listener in ((quiet, None), (recorded, recorder)):
                channels = MadeUpChannels(everyone, group, group, (1,), torch.float, torch.device("cpu"))
                recorder.forget()
                start = time.perf_counter()
                execute(plan, stages, channels, listener)
                times.append((time.perf_counter() - start) / len(plan.steps))
        met = "met" if median(quiet) <= GOAL else f"goal {1e6 * GOAL:.0f}"
        taken = (f"{1e6 * of(times):.1f}" for times in (quiet, recorded) for of in (median, min))
        rows.append((family, len(plan.steps), *taken, f"{1e3 * planning:.1f}", met))
    head = (
        "schedule", "actions", "us an action, median", "least", "recorded, median", "least",
        "ms to plan, once", "goal",
    )  # fmt: skip
    text = [
        "# Python between actions",
        "",
        f"`python benchmarks/overhead.py` on {platform.machine()}, {date.today()}: rank {RANK} of {RANKS}, "
        f"m = {MICROBATCHES}, {REPEATS} steps; nothing is computed and nothing is sent.",
        "",
        table(head, rows),
    ]
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    typer.run(main)
