"""What does the plugin add to the start of a rank: imports, patches, and the schedule itself?

    python -m benchmarks.runtime.start_up

Every number is the median of several processes, after one that fills bytecode and disk caches.  The seconds
over stock are those of importing and installing the plugin once Megatron's trainer is imported, as the
launcher does, and of building, checking and planning a schedule.  Writes results/start_up.md.
"""

import subprocess
import sys
from statistics import median
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.report import RESULTS, Out, publish, table
from megatron_pp_ext.schedule import catalog

RANKS, MICROBATCHES = 8, 64

STOCK = "import megatron.training.training"
INSTALL = "from megatron_pp_ext.launch import install; install()"
SCHEDULE = f"""
schedule = catalog.build({{name!r}}, {RANKS}, {MICROBATCHES})
plan_rank(schedule, {RANKS // 2})
schedule.digest
"""
SCHEDULE_IMPORTS = """
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.runtime.plan import plan_rank
"""
COMPILE = f"""
costs = Costs((StageCosts(10.0, 11.0, 7.0),) * {2 * RANKS}, 1.0)
compile_schedule({RANKS}, {MICROBATCHES}, costs, {RANKS}, placements=[v({RANKS})])
"""
COMPILE_IMPORTS = """
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import v
"""
NO_CACHE = "import os; os.environ['MEGATRON_PP_EXT_CACHE'] = '/dev/null'"

PROGRAMS = {
    "stock: `import megatron.training.training`": ("", STOCK),
    "the plugin over that: import and `install()`": (STOCK, INSTALL),
    **{
        f"`{name}`: build, check, plan, digest": (SCHEDULE_IMPORTS, SCHEDULE.format(name=name))
        for name in catalog.NAMES
    },
    "`flex` on a V, not in the cache": (f"{NO_CACHE}\n{COMPILE_IMPORTS}", COMPILE),
    "`flex` on a V, in the cache": (COMPILE_IMPORTS, COMPILE),
}
"""The measured programs: an untimed beginning, and the part that is timed."""


def seconds(beginning: str, timed: str, repeats: int) -> float:
    """Return the median seconds of ``timed``, each time in a process of its own."""
    clock = "import time; start = time.perf_counter()"
    program = "\n".join([beginning, clock, timed, "print(time.perf_counter() - start)"])
    times = []
    for _ in range(repeats + 1):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        times.append(float(run.stdout.split()[-1]))
    return median(times[1:])


def main(
    out: Out = RESULTS / "start_up.md",
    repeats: Annotated[int, typer.Option(help="Processes for each number.")] = 5,
) -> None:
    """Measure and write the table."""
    rows = [
        (name, f"{seconds(*program, repeats):.3f}") for name, program in track(PROGRAMS.items(), "measuring")
    ]
    about = f"Schedules are for p = {RANKS}, m = {MICROBATCHES}."
    publish(out, "What the plugin adds to the start of a rank", about, table(["what", "seconds"], rows))


if __name__ == "__main__":
    typer.run(main)
