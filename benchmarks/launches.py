"""Which pipelines would hang a GPU, and what do messages that wait cost?  Writes results/launches.md.

    python benchmarks/launches.py            # about two minutes on one core
    python benchmarks/launches.py --quick    # prints only what the planned messages cost, on average

No GPU: the product's executor, channels and plans leave what every rank would launch, and the model of
launch queues in tests/launches runs it.  Other rules for posting receives are there for comparison.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.progress import track
from tables import Row, table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "launches"))

from megatron_pp_ext.schedule.actions import Kind  # noqa: E402
from megatron_pp_ext.schedule.costs import Costs  # noqa: E402
from megatron_pp_ext.schedule.simulate import simulate  # noqa: E402
from tests.support.launches.clocked import PROCESSORS, seconds  # noqa: E402
from tests.support.launches.entries import Launches  # noqa: E402
from tests.support.launches.grid import Steps, everything, families  # noqa: E402
from tests.support.launches.hardware import Setting  # noqa: E402
from tests.support.launches.policies import ONE_AHEAD, TWO_AHEAD, WHEN_NEEDED, launch  # noqa: E402
from tests.support.launches.queues import circle  # noqa: E402
from tests.support.launches.recording import record  # noqa: E402
from tests.support.launches.synchronizations import before_every_action, before_every_launch, never  # noqa: E402

RESULTS = HERE / "results" / "launches.md"
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
    """How many pipelines hang."""
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


def ratios(
    times: Times, timed: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """By schedule and p, then by column: the step over one with free messages, for each of ``TAKEN``."""
    found = {}
    for (schedule,) in track([one for p in (4, 8) for one in families(p, 2 * p)], "timing steps"):
        free = simulate(
            schedule,
            Costs.uniform(
                schedule.placement,
                forward=times[Kind.F],
                input_gradient=times[Kind.I],
                weight_gradient=times[Kind.W],
                hop=HOP,
            ),
        ).makespan
        launched = {policy: POLICIES[policy]((schedule,), times) for policy, _ in timed.values()}
        found[schedule.name, schedule.ranks] = {
            column: [seconds(launched[policy], Setting(queues), HOP, taken) / free for taken in TAKEN]
            for column, (policy, queues) in timed.items()
        }
    return found


def averages(found: Mapping[tuple[str, int], Mapping[str, list[float]]]) -> str:
    """One row a column of ``found``."""
    columns = next(iter(found.values()))
    rows: list[Row] = [
        (column, *(f"{mean(row[column][at] for row in found.values()):.4f}" for at in range(len(TAKEN))))
        for column in columns
    ]
    return table(["receives", *TAKEN], rows)


def each(found: Mapping[tuple[str, int], Mapping[str, list[float]]]) -> str:
    """One row a schedule."""
    columns = next(iter(found.values()))
    rows: list[Row] = [
        (name, p, *(" ".join(f"{value:.3f}" for value in values) for values in row.values()))
        for (name, p), row in found.items()
    ]
    return table(["schedule", "p", *columns], rows)


def main(
    quick: Annotated[bool, typer.Option(help="Print what the planned messages cost; write nothing.")] = False,
) -> None:
    """Count, time and write the tables."""
    if quick:
        planned = {column: what for column, what in TIMED.items() if what[0] == "planned"}
        for title, times in TIMES.items():
            found = ratios(times, planned)
            print(title, averages(found), each(found), sep="\n\n")
        return
    parts = [
        "# Messages in a model of a GPU's launch queues",
        f"`python benchmarks/launches.py`, {datetime.now(UTC):%Y-%m-%d}.  Nothing here ran on a GPU.",
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
        found = ratios(times, TIMED)
        parts += [f"### {title}", "Averages:", averages(found), "Each schedule:", each(found)]
    RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
