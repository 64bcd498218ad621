"""Which pipelines would hang a GPU, and what do waiting messages cost?  Writes results/launches.md.

    python -m benchmarks.runtime.launches        # about two minutes on one core

This needs no GPU: the product's executor, channels and plans record what every rank would launch, and the
model of launch queues in tests/support/launches runs it.  Other rules for posting receives are compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import mean

import typer
from rich.progress import track

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.launches.clocked import PROCESSORS, seconds
from tests.support.launches.entries import Launches
from tests.support.launches.grid import Steps, everything, families
from tests.support.launches.hardware import Setting
from tests.support.launches.policies import ONE_AHEAD, TWO_AHEAD, WHEN_NEEDED, launch
from tests.support.launches.queues import circle
from tests.support.launches.recording import record
from tests.support.launches.synchronizations import before_every_action, before_every_launch, never

HOP = 0.05
TAKEN = (0, 2, 4, 16)

Times = Mapping[Kind, float]
TIMES = {
    "F, I, W = 1, 1, 1": {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0},
    "F, I, W = 1, 1.1, 0.7": {Kind.F: 1.0, Kind.I: 1.1, Kind.W: 0.7, Kind.B: 1.8},
}

POLICIES: dict[str, Callable[[Steps, Times], tuple[Launches, ...]]] = {
    "two ahead": lambda steps, times: launch(steps, TWO_AHEAD, times),
    "one ahead": lambda steps, times: launch(steps, ONE_AHEAD, times),
    "when needed": lambda steps, times: launch(steps, WHEN_NEEDED, times),
    "planned": lambda steps, times: record(steps, seconds=times),
}

HARDWARE = {
    "Q = 1": (Setting(1), never),
    "Q = 2": (Setting(2), never),
    "Q = 8": (Setting(8), never),
    "Q = 8, 6 foreign streams": (Setting(8, foreign_streams=6), never),
    "Q = 32, a stream a group": (Setting(32, stream_a_pair=False), never),
    "Q = 32, synchronized before every action": (Setting(32), before_every_action),
    "Q = 1, synchronized before every launch": (Setting(1), before_every_launch),
}

TIMED = {
    "two ahead, Q = 32": ("two ahead", 32),
    "one ahead, Q = 32": ("one ahead", 32),
    "planned, Q = 32": ("planned", 32),
    "planned, Q = 1": ("planned", 1),
}


def hangs() -> str:
    """Return a table of how many pipelines hang."""
    unit = TIMES["F, I, W = 1, 1, 1"]
    pipelines = [steps for p in (2, 4, 8) for factor in (1, 2, 4) for steps in everything(p, factor * p)]
    counts = {policy: {hardware: [0, 0] for hardware in HARDWARE} for policy in POLICIES}
    for steps in track(pipelines, "counting hangs"):
        for policy, launches_of in POLICIES.items():
            launched = launches_of(steps, unit)
            for hardware, (setting, synchronized) in HARDWARE.items():
                ranks = [synchronized(launches) for launches in launched]
                for at, waits in enumerate((True, False)):
                    counts[policy][hardware][at] += circle(ranks, replace(setting, sends_wait=waits)) != ""
    rows = [(policy, *(f"{w} / {l}" for w, l in row.values())) for policy, row in counts.items()]
    return table([f"of {len(pipelines)} pipelines", *HARDWARE], rows)


def ratios(times: Times) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return, by schedule and p, then by column, a step over one with free messages for each of ``TAKEN``."""
    found = {}
    stage = StageCosts(times[Kind.F], times[Kind.I], times[Kind.W])
    for (schedule,) in track([one for p in (4, 8) for one in families(p, 2 * p)], "timing steps"):
        free = simulate(schedule, Costs((stage,) * schedule.placement.stages, HOP)).makespan
        launched = {policy: POLICIES[policy]((schedule,), times) for policy, _ in TIMED.values()}
        found[schedule.name, schedule.ranks] = {
            column: [seconds(launched[policy], Setting(queues), HOP, taken) / free for taken in TAKEN]
            for column, (policy, queues) in TIMED.items()
        }
    return found


def averages(found: Mapping[tuple[str, int], Mapping[str, list[float]]]) -> str:
    """Return a table with a row for each column of ``found``."""
    columns = next(iter(found.values()))
    rows: list[Row] = [
        (column, *(f"{mean(row[column][at] for row in found.values()):.4f}" for at in range(len(TAKEN))))
        for column in columns
    ]
    return table(["receives", *TAKEN], rows)


def each(found: Mapping[tuple[str, int], Mapping[str, list[float]]]) -> str:
    """Return a table with a row for each schedule."""
    columns = next(iter(found.values()))
    rows: list[Row] = [
        (name, p, *(" ".join(f"{value:.3f}" for value in values) for values in row.values()))
        for (name, p), row in found.items()
    ]
    return table(["schedule", "p", *columns], rows)


def main(out: Out = RESULTS / "launches.md") -> None:
    """Count, time and write the tables."""
    parts = [
        "## Hangs",
        "All families, evaluations with five placements, and PipeDream over three updates; p = 2, 4, 8 and "
        "m = p, 2p, 4p.  The first number is for sends that wait for their receives, the second for sends "
        "that leave at once.",
        hangs(),
        "## Step over one with free messages",
        f"p = 4, 8, m = 2p.  A message takes {HOP} of a forward once both its ends have started, and a send "
        "waits for its receive.  Every message that waits or travels takes so many of "
        f"{PROCESSORS} processors (SMs) from compute as the column says: {', '.join(map(str, TAKEN))}; "
        "below, the four numbers of a column are those.  Free messages take as long, but no processors, and "
        "nothing waits behind them.",
    ]
    for title, times in TIMES.items():
        found = ratios(times)
        parts += [f"### {title}", "Averages:", averages(found), "Each schedule:", each(found)]
    publish(out, "Messages in a model of a GPU's launch queues", "Nothing here ran on a GPU.", *parts)


if __name__ == "__main__":
    typer.run(main)
