"""Does a step in pairs take as long as Megatron's plan of a layer says, and less than stock's own pairs?

    python -m benchmarks.runtime.pairs [--shares 0.1,0.2,0.3] [--rounds 1] [--steps 2]

A tiny GPT with experts trains on four pipeline ranks, each of which shares its experts with a second one.
Products with weights and exchanges of tokens take time on a device that sleeps (``expert_layers``), so that
eight ranks fit on two cores.  Schedules run with pairs and without, beside stock's.  Writes results/pairs.md.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

from tests.support import training
from tests.support.ranks import run_ranks

# isort: split
import torch.distributed as dist
import typer

from benchmarks.measuring import in_turns
from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime import stages
from benchmarks.runtime.expert_layers import (
    AROUND_ATTENTION,
    CHUNKS,
    EXPERT_RANKS,
    FLAGS,
    MICROBATCHES,
    OF_EXPERTS,
    PRODUCT,
    RANKS,
    SHARES,
    WORLD,
    Clock,
    Step,
    Times,
    costs,
)
from benchmarks.runtime.machine import cores_awake, pin_to_core, step_seconds
from benchmarks.runtime.systems import Gloo, World, walk
from megatron_pp_ext import cpu, pretrain_gpt
from megatron_pp_ext.launch import install
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.simulate import simulate

MESSAGES = stages.Times(0.0, 0.0, 0.0, 4096)
"""The messages of gloo alone, which are a little larger than the model's; the times here are not used."""

ALL_SHARES = ",".join(map(str, SHARES))
FLEX, LIMIT = "flex", 1.25
PAIRS = "--overlap-moe-expert-parallel-comm"
STOCK, OURS, GLOO = "Megatron", "ours", "gloo alone"


class System(NamedTuple):
    """A schedule with or without pairs, run by Megatron, by our executor, or by gloo and sleeping alone."""

    runner: str
    schedule: str
    has_pairs: bool

    def __str__(self) -> str:
        return f"{self.runner} {self.schedule}{' in pairs' if self.has_pairs else ''}"

    def flags(self, share: float, folder: Path) -> list[str]:
        """Return the flags of a job; ``folder`` is for its costs."""
        words = [PAIRS] if self.has_pairs else []
        if self.runner == STOCK:
            return [*words, "--num-layers-per-virtual-pipeline-stage", "1"]
        words += ["--pipeline-schedule", self.schedule]
        if self.schedule == FLEX:
            file = folder / "costs.json"
            costs_file.write(costs(Times.of(share), CHUNKS), file)
            words += ["--pipeline-memory-limit", str(LIMIT), "--pipeline-costs", str(file)]
        return words


SYSTEMS = (
    *(System(GLOO, "interleaved", has_pairs) for has_pairs in (False, True)),
    *(System(STOCK, "interleaved", has_pairs) for has_pairs in (False, True)),
    *(
        System(OURS, name, has_pairs)
        for name in ("interleaved", "1f1b", "dualpipe-v", FLEX)
        for has_pairs in (False, True)
    ),
)


def train(rank: int, flags: Sequence[str], times: Sequence[Times]) -> tuple[list[Step], Schedule | None]:
    """Train a step with each of ``times`` on one rank; return the steps, and the schedule if it is ours."""
    pin_to_core(rank)
    clock = Clock(times)
    clock.install()
    words = [*training.TINY, "--mock-data", *FLAGS.split(), "--train-iters", str(len(times)), *flags]
    sys.argv = ["pretrain_gpt.py", *cpu.with_cpu_flags(words)]
    pretrain_gpt.main()
    pipeline = requested.pipeline()
    source = pipeline.source if pipeline is not None else None
    return clock.steps, source.schedule(MICROBATCHES) if source is not None else None


def send_alone(rank: int, schedule: Schedule, times: Sequence[Costs]) -> list[Step]:
    """Do the steps with gloo's messages and sleeping alone, in as many pipelines as there are experts."""
    pin_to_core(rank)
    dist.init_process_group("gloo")
    pipeline = list(range(rank % EXPERT_RANKS, WORLD, EXPERT_RANKS))
    all_ranks = dist.group.WORLD
    assert all_ranks is not None
    world = World(all_ranks, *direction_groups(pipeline))
    plan = plan_rank(schedule, rank // EXPERT_RANKS)
    steps = []
    for of_stages in times:
        dist.barrier()
        start = time.perf_counter()
        walk(plan, of_stages, Gloo(world, MESSAGES, plan.rank))
        steps.append(Step(start, time.perf_counter()))
    return steps


class Run(NamedTuple):
    """The seconds of a step of ``system``; ``share`` is the exchanges' part, 0 where nothing takes time."""

    system: str
    share: float
    predicted: float
    seconds: float


def measured(system: System, share: float, steps: int) -> list[Run]:
    """Run a job of ``system``: one step without time, and ``steps`` in which exchanges take ``share``."""
    times = [Times(), Times(), *[Times.of(share)] * steps]  # the first step makes connections
    schedule = catalog.build("interleaved", RANKS, MICROBATCHES, paired=system.has_pairs)
    if system.runner == GLOO:
        of_stages = costs(times[-1], schedule.placement.chunks)
        ranks = run_ranks(send_alone, WORLD, schedule, [of_stages] * steps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(train, WORLD, system.flags(share, Path(folder)), times)
        ranks = [steps for steps, _ in results]
        schedule = results[0][1] or schedule
    seconds = step_seconds(ranks)
    name = str(system)
    expected = simulate(schedule, costs(times[-1], schedule.placement.chunks)).makespan
    runs = [Run(name, share, expected, seconds_of_step) for seconds_of_step in seconds[-steps:]]
    return runs if system.runner == GLOO else [Run(name, 0.0, 0.0, seconds[1]), *runs]


def rows_of(runs: Sequence[Run], share: float) -> list[Row]:
    """Return a row for each system: predicted and measured seconds, and their ratios."""
    seconds: dict[str, list[float]] = {}
    expected: dict[str, float] = {}
    for run in runs:
        if run.share == share:
            seconds.setdefault(run.system, []).append(run.seconds)
            expected[run.system] = run.predicted
    goal = median(seconds[str(System(STOCK, "interleaved", True))])
    return [
        (
            name,
            f"{expected[name]:.3f}",
            f"{median(of_system):.3f}",
            f"{min(of_system):.3f}",
            f"{median(of_system) / expected[name]:.3f}",
            f"{median(of_system) / goal:.3f}",
        )
        for name, of_system in seconds.items()
    ]


def section(runs: Sequence[Run], share: float) -> str:
    """Return the section of the steps in which exchanges take ``share`` of a layer."""
    times = Times.of(share)
    head = ("schedule", "predicted s", "median s", "least s", "median/predicted", "median/Megatron in pairs")
    about = (
        f"An exchange takes {1e3 * times.exchange:.1f} ms, and a pair {costs(times, CHUNKS).pair:.3g} of the "
        "sum of its halves."
    )
    return f"## {share:.0%} of a layer\n\n{about}\n\n{table(head, rows_of(runs, share))}"


def without_time(runs: Sequence[Run]) -> str:
    """Return the section of the steps in which nothing takes time on the device."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if not run.share:
            seconds.setdefault(run.system, []).append(run.seconds)
    rows = [(name, f"{median(of_system):.3f}") for name, of_system in seconds.items()]
    about = "Python, autograd and gloo of all eight ranks, where neither products nor exchanges take time."
    return f"## What two cores do in a step\n\n{about}\n\n{table(('schedule', 'median s'), rows)}"


def kept(file: Path | None) -> list[Run]:
    """Return the runs that ``file`` has, one a line."""
    if file is None or not file.exists():
        return []
    return [Run(*json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def main(
    out: Out = RESULTS / "pairs.md",
    shares: Annotated[str, typer.Option(help="Parts of a layer that its exchanges take.")] = ALL_SHARES,
    rounds: Annotated[int, typer.Option(help="Jobs of each schedule and part.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of a job that count.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="A file that steps are added to; those that it has count too.")
    ] = None,
) -> None:
    """Measure all systems in turns and write the tables."""
    install()
    runs = kept(keep)

    def measure(system: System, share: float) -> None:
        runs_of_job = measured(system, share, steps)
        runs.extend(runs_of_job)
        if keep is not None:
            with keep.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(run)}\n" for run in runs_of_job)

    with cores_awake():
        for share in map(float, shares.split(",")):
            ways = {system: partial(measure, system, share) for system in SYSTEMS}
            in_turns(ways, rounds, title=f"{share:.0%}")
    count = min(Counter((run.system, run.share) for run in runs if run.share).values())
    measured_shares = sorted({run.share for run in runs if run.share})
    about = (
        f"p = {RANKS}, m = {MICROBATCHES}, {EXPERT_RANKS} ranks share the experts of a stage; a rank has "
        f"{CHUNKS} layers with {AROUND_ATTENTION} products around the attention and {OF_EXPERTS} in its "
        f"experts, each of which takes {1e3 * PRODUCT:.0f} ms in F, I and W. Predicted: simulated with these "
        f"times, without messages. Medians are of {count} steps or more, in jobs that take turns. Gradients "
        f"are not reduced within the step. `flex` has {LIMIT} of 1F1B's memory."
    )
    publish(
        out, "Steps in pairs", about, *(section(runs, share) for share in measured_shares), without_time(runs)
    )


if __name__ == "__main__":
    typer.run(main)
