"""Does a step of microbatches of unlike length take its planned time?  (stages that sleep by tokens, gloo)

    python -m benchmarks.runtime.lengths [--ranks 4] [--microbatches 8] [--forward 0.05] [--repeats 3]
        [--real-time]

Every family runs on our executor in the order given, by the rule and as a search finds, in turns and in the
same processes, with W in the holes of the step as in training.  A stage sleeps for its microbatch's seconds.
Writes results/lengths_runtime.md.
"""

import os
import time
from collections.abc import Callable, Iterable
from random import Random
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.machine import cores_awake, pin_to_core, spans_in_turns, step_seconds
from benchmarks.runtime.stages import Times
from benchmarks.runtime.systems import RunStep, World
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.plan import Plan, Planner, Template
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from tests.support.ranks import run_ranks

FAMILIES = "1f1b", "interleaved", "zb-h1", "v-half"
HOWS: tuple[How, ...] = "given", "rule", "search"
MESSAGE = Times(0, 0, 0, 8 << 10)


class UnlikeStage:
    """A ``runtime.rank.Stage`` that sleeps for the seconds of each microbatch."""

    def __init__(self, stage: int, costs: UnitCosts) -> None:
        self._stage, self._costs = stage, costs

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Sleep for F."""
        return self._after(Kind.F, microbatch)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Sleep for B."""
        return self._after(Kind.B, microbatch)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Sleep for I."""
        return self._after(Kind.I, microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for W."""
        time.sleep(self._costs.seconds(Action(self._stage, Kind.W, microbatch)))

    def _after(self, kind: Kind, microbatch: int) -> torch.Tensor:
        time.sleep(self._costs.seconds(Action(self._stage, kind, microbatch)))
        return torch.empty(MESSAGE.shape)


def lengths(microbatches: int) -> Microbatches:
    """Return documents of a lognormal distribution, as answers of a reinforcement-learning run have it."""
    random = Random(1)
    documents = [
        [min(20_480, int(random.lognormvariate(8.7, 0.8)) + 1) for _ in range(random.randint(1, 3))]
        for _ in range(microbatches)
    ]
    return Microbatches.of(documents)


def planned(family: str, how: How, ranks: int, microbatches: int, forward: float) -> tuple[Plan, UnitCosts]:
    """Return the plan of the step, and the costs of its microbatches in its order."""
    schedule, step = catalog.build(family, ranks, microbatches), lengths(microbatches)
    mean = sum(step.tokens) / microbatches
    kinds = "forward", "input_gradient", "weight_gradient"
    unit = Costs.per_rank(ranks, schedule.placement.chunks, **dict.fromkeys(kinds, forward))
    planner = Planner(schedule.placement, LengthCosts.with_attention(unit, mean))
    units = planner.whole(step.documents)
    plan = planner.timed(planner.plan(units, how, template=Template(schedule)))
    return plan, planner.costs(units).ordered(plan.order)


def stages(plan: Plan, costs: UnitCosts) -> dict[int, UnlikeStage]:
    """Return the stages of this rank."""
    return {stage: UnlikeStage(stage, costs) for stage in plan.schedule.placement.stages_of(dist.get_rank())}


def build(world: World, family: str, how: How, sizes: tuple[int, int, float]) -> RunStep:
    """Build a step on this rank, as training runs it."""
    plan, costs = planned(family, how, *sizes)
    mine, parts = plan_rank(plan.schedule, dist.get_rank()), stages(plan, costs)
    # New channels for each step, as in training.
    return lambda: execute(mine, Rank(parts, world.channels(MESSAGE)))


def measured(
    make: Callable[..., RunStep],
    families: Iterable[str],
    ways: Iterable[Any],
    sizes: tuple[int, int, float],
    repeats: int,
    real_time: bool,
) -> dict[tuple[str, Any], list[float]]:
    """Run all ``ways`` of all ``families`` in turns, and return the seconds of the steps of each.

    ``sizes`` are the ranks, the microbatches and the seconds of a mean F without attention.  With
    ``real_time`` the ranks run before all else on the machine.
    """
    names = [(family, way) for family in families for way in ways]

    def spans(rank: int) -> dict[tuple[str, Any], list[tuple[float, float]]]:
        pin_to_core(rank)
        if real_time:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        world = World.join(sizes[0])
        return spans_in_turns({name: make(world, *name, sizes) for name in names}, repeats)

    with cores_awake():
        every = run_ranks(spans, sizes[0], timeout=3600)
    return {name: step_seconds([spans[name] for spans in every]) for name in names}


RealTime = Annotated[
    bool, typer.Option(help="Let the ranks run before all else on a busy machine; needs root.")
]


def main(
    out: Out = RESULTS / "lengths_runtime.md",
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    forward: Annotated[float, typer.Option(help="Seconds of a mean F without attention.")] = 0.05,
    repeats: Annotated[int, typer.Option(help="Steps of each way that count.")] = 3,
    real_time: RealTime = False,
) -> None:
    """Measure, and write a table."""
    sizes = ranks, microbatches, forward
    seconds_of = measured(build, FAMILIES, HOWS, sizes, repeats, real_time)
    rows: list[Row] = []
    for family in FAMILIES:
        of_given = planned(family, "given", *sizes)[0].seconds
        for how in HOWS:
            plan, _ = planned(family, how, *sizes)
            steps = seconds_of[family, how]
            numbers = (plan.seconds, median(steps), min(steps))
            moved = "yes" if plan.schedule.orders != catalog.build(family, ranks, microbatches).orders else ""
            rows.append(
                (
                    family,
                    how,
                    *(f"{1e3 * seconds:.0f}" for seconds in numbers),
                    *(f"{seconds / plan.seconds:.3f}" for seconds in numbers[1:]),
                    f"{plan.seconds / of_given:.3f}",
                    moved,
                )
            )
    heads = (
        *("schedule", "order", "simulated ms", "median ms", "least ms"),
        *("median/simulated", "least/simulated", "simulated/given", "W moved"),
    )
    about = (
        f"p = {ranks}, m = {microbatches}, {repeats} steps of each way in turns. A stage sleeps for "
        f"{1e3 * forward:.0f} ms in each of F, I and W of a mean microbatch, and for attention by the "
        "squares of documents; messages of 8 KiB over gloo."
    )
    publish(out, "Steps of microbatches of unlike length", about, table(heads, rows))


if __name__ == "__main__":
    typer.run(main)
