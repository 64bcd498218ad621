"""Do replicated stages keep the pace that mpp estimate simulates?  (two CPU cores, gloo, ranks that sleep)

    python -m benchmarks.runtime.replicas [--updates N] [--repeats N]

Every rank is a process that sleeps for the F and B of its stage and runs the steps that training runs, over
the same channels.  At an update the replicas of a stage all-reduce, and sleep for what the update takes.
Writes results/replicas.md.
"""

import time
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.progress import track

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.stages import SleepingStage, Times
from benchmarks.runtime.systems import World
from megatron_pp_ext.pipedream.pace import seconds_of_an_update
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from tests.support.ranks import run_ranks

FILLING = 3
"""Updates that are not timed."""

FORWARD, BACKWARD, UPDATE = 0.010, 0.020, 0.015
"""Seconds of the forward and the backward of a stage, for each of its replicas, and of their update."""


class Case(NamedTuple):
    """A pipeline whose stage of r replicas takes r times ``FORWARD`` and ``BACKWARD``, or ``share`` of it."""

    replicas: Replicas
    interval: int
    share: tuple[float, ...]

    def times(self, stage: int) -> Times:
        """Return for how long a replica of ``stage`` sleeps."""
        scale = self.replicas.counts[stage] * self.share[stage]
        return Times(scale * FORWARD, scale * BACKWARD / 2, scale * BACKWARD / 2, 8 << 10)

    @property
    def updating(self) -> list[float]:
        """The seconds of an update; replicas have gradients to add up."""
        return [UPDATE if count > 1 else 0.0 for count in self.replicas.counts]

    @property
    def busiest(self) -> float:
        """The milliseconds a microbatch of the busiest replica."""
        works = (share * (FORWARD + BACKWARD) for share in self.share)
        return 1e3 * max(
            work + update / self.interval for work, update in zip(works, self.updating, strict=True)
        )

    @property
    def estimated(self) -> float:
        """The simulated milliseconds a microbatch."""
        stages = (self.times(stage) for stage in range(self.replicas.stages))
        costs = Costs(
            tuple(StageCosts(times.forward, times.input_gradient, times.weight_gradient) for times in stages)
        )
        return 1e3 * seconds_of_an_update(self.replicas, self.interval, costs, self.updating) / self.interval


def case(replicas: str, interval: int, *share: float) -> Case:
    """Return the case of ``replicas``, as in 3-1; every stage has its whole share unless others are given."""
    counts = tuple(map(int, replicas.split("-")))
    return Case(Replicas(counts), interval, share or (1.0,) * len(counts))


CASES = (
    case("1-1", 2), case("2-1", 2), case("2-1", 8), case("3-1", 3), case("3-1", 12), case("2-1", 2, 0.5, 1.0),
    case("1-2", 2), case("1-2", 8), case("2-1-1", 2), case("2-1-1", 8), case("1-2-1", 4), case("1-1-3-1", 3),
    case("1-1-3-1", 3, 0.1, 0.1, 1.0, 0.1),
)  # fmt: skip


def sleep_through(rank: int, one: Case, updates: int) -> float:
    """Run all updates on one rank, and return its milliseconds a microbatch after the first ones."""
    torch.set_num_threads(1)
    replicas = one.replicas
    number, world = replicas.stage_of(rank), World.join(replicas.ranks)
    groups = [dist.new_group(list(replicas.ranks_of(stage))) for stage in range(replicas.stages)]
    times = one.times(number)
    channels, stage, ends = world.channels(times), SleepingStage(times, chunks=1), []
    total = FILLING + updates
    dist.barrier()
    for update in range(total):
        orders = pipedream.step(replicas, one.interval, update, total + replicas.ranks)
        plan = plan_orders(replicas.placed(orders), rank, flushes=False)
        execute(plan, Rank({number: stage}, channels))
        if replicas.counts[number] > 1:
            dist.all_reduce(torch.zeros(1), group=groups[number])
            time.sleep(UPDATE)
        ends.append(time.perf_counter())
    dist.barrier()  # messages are in flight, and go with the channels
    return 1e3 * (ends[-1] - ends[FILLING - 1]) / (updates * one.interval)


def row_of(case: Case, updates: int, repeats: int) -> Row:
    """Return the row of a case: of several runs the fastest, of which the slowest rank."""
    measured = min(max(run_ranks(sleep_through, case.replicas.ranks, case, updates)) for _ in range(repeats))
    shares = "" if set(case.share) == {1.0} else ", ".join(f"{share:g}" for share in case.share)
    milliseconds = (f"{value:.1f}" for value in (case.busiest, case.estimated, measured))
    return (case.replicas, case.interval, shares, *milliseconds, f"{measured / case.estimated:.2f}")


def main(
    out: Out = RESULTS / "replicas.md",
    updates: Annotated[int, typer.Option(help="Updates that are timed.")] = 24,
    repeats: Annotated[int, typer.Option(help="Runs of each case, of which the fastest counts.")] = 3,
) -> None:
    """Measure all cases and write the table."""
    head = (
        "replicas", "K", "work of stages", "busiest rank, ms", "estimated ms", "measured ms",
        "measured/estimated",
    )  # fmt: skip
    rows = [row_of(case, updates, repeats) for case in track(CASES, "measuring")]
    about = (
        f"Milliseconds a microbatch. A replica sleeps for F = {1e3 * FORWARD:g} and B = {1e3 * BACKWARD:g} "
        f"ms, times the replicas of its stage and the work of the stage where that is not 1; replicas take "
        f"{1e3 * UPDATE:g} ms more for an update, every K microbatches. {updates} updates behind {FILLING}. "
        f"The fastest of {repeats} runs counts, since ranks share the cores with whatever else runs there. "
        "The busiest rank is what a microbatch would take if none ever waited, as `mpp partition` counts; "
        "the estimate simulates the steps without the time that messages and processes take here."
    )
    publish(out, "Measured against estimated pace of replicated stages", about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
