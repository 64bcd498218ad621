"""How much time do messages cost that announce their shapes?  (stages that sleep by tokens, gloo)

    python -m benchmarks.runtime.announced_shapes [--ranks 4] [--microbatches 12] [--forward 0.03]
        [--repeats 3] [--real-time]

Every family runs on our executor with known shapes and with announced ones, whose receives are posted as
where shapes are known, or late, in turns and in the same processes.  Writes results/announced_runtime.md.
"""

from statistics import median
from typing import Annotated, NamedTuple

import torch.distributed as dist
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.lengths import MESSAGE, RealTime, measured, planned, stages
from benchmarks.runtime.systems import RunStep, World
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Announced
from tests.support import few_sends

FAMILIES = "1f1b", "interleaved", "zb-h1", "v-half", "v-zb"
HOW: How = "rule"


class Way(NamedTuple):
    """The messages that announce their shapes, and whether receives are posted late."""

    announced: Announced
    is_late: bool


WAYS = {
    "known": Way(Announced.NOTHING, False),
    "every one, receives as with known shapes": Way(Announced.EVERY, False),
    "every one, late receives": Way(Announced.EVERY, True),
    "first of a rank, late receives": Way(Announced.FIRST, True),
}


def build(world: World, family: str, name: str, sizes: tuple[int, int, float]) -> RunStep:
    """Build a step on this rank, as training runs it."""
    plan, costs = planned(family, HOW, *sizes)
    way = WAYS[name]
    announced = way.announced if way.is_late else Announced.NOTHING
    mine = plan_rank(plan.schedule, dist.get_rank(), announced=announced)
    parts = stages(plan, costs)

    def channels() -> Channels:
        if way.announced is Announced.NOTHING:
            return world.channels(MESSAGE)
        return world.announcing_channels(has_one_shape=way.announced is Announced.FIRST)

    return lambda: execute(mine, Rank(parts, channels()))


def main(
    out: Out = RESULTS / "announced_runtime.md",
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 12,
    forward: Annotated[float, typer.Option(help="Seconds of a mean F without attention.")] = 0.03,
    repeats: Annotated[int, typer.Option(help="Steps of each way that count.")] = 3,
    real_time: RealTime = False,
) -> None:
    """Measure, and write a table."""
    sizes = ranks, microbatches, forward
    seconds_of = measured(build, FAMILIES, WAYS, sizes, repeats, real_time)
    rows: list[Row] = []
    for family in FAMILIES:
        plan, costs = planned(family, HOW, *sizes)
        medians = {name: median(seconds_of[family, name]) for name in WAYS}
        for name, way in WAYS.items():
            simulated = few_sends.step_seconds(plan.schedule, costs, *way)
            of_known = medians[name] / medians["known"], simulated / plan.seconds
            ratios = (f"{ratio:.3f}" for ratio in (*of_known, medians[name] / simulated))
            rows.append((family, name, f"{1e3 * simulated:.0f}", f"{1e3 * medians[name]:.0f}", *ratios))
    heads = (
        *("schedule", "announced", "simulated ms", "median ms", "median/known", "simulated/known"),
        "median/simulated",
    )
    about = (
        f"p = {ranks}, m = {microbatches}, ordered by rule, {repeats} steps of each way in turns. A stage "
        f"sleeps for {1e3 * forward:.0f} ms in each of F, I and W of a mean microbatch, and for attention by "
        "the squares of documents; messages of 8 KiB over gloo."
    )
    publish(out, "Steps whose messages announce their shapes", about, table(heads, rows))


if __name__ == "__main__":
    typer.run(main)
