"""What the schedules add to the start of a rank: imports, patches, and the schedule itself.

    python benchmarks/start_up.py

Every import is timed in a process of its own, with bytecode and disk caches warm, medians of several.  The
seconds over stock are those of importing and installing the plugin once Megatron's trainer is imported, as
the launcher does, and of building, checking and planning a schedule.  Writes results/start_up.md.
"""

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.progress import track
from tables import table

from megatron_pp_ext.schedule import catalog

RESULTS = Path(__file__).parent / "results"
RANKS, MICROBATCHES = 8, 64

_TIMER = "import time; start = time.perf_counter(); {work}; print(time.perf_counter() - start)"

_INSTALL = _TIMER.format(work="from megatron_pp_ext.integration import install; install()")
_STOCK = "import megatron.training.training"
_SCHEDULE = """
import time
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.runtime.plan import plan_rank
start = time.perf_counter()
schedule = catalog.build({name!r}, {ranks}, {microbatches})
plan_rank(schedule, {ranks} // 2)
schedule.digest
print(time.perf_counter() - start)
"""
_COMPILE = """
import time
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import v
start = time.perf_counter()
costs = Costs((StageCosts(10.0, 11.0, 7.0),) * {stages}, 1.0)
compile_schedule({ranks}, {microbatches}, costs, {ranks}, placements=[v({ranks})])
print(time.perf_counter() - start)
"""


def seconds(program: str, repeats: int) -> float:
    """The median of what ``program`` prints last, over as many processes."""
    found = []
    for _ in range(repeats + 1):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        found.append(float(run.stdout.split()[-1]))
    return median(found[1:])


def main(repeats: Annotated[int, typer.Option(help="Processes for each figure.")] = 5) -> None:
    """Measure and write the results."""
    programs = {
        "stock: `import megatron.training.training`": _TIMER.format(work=_STOCK),
        "the plugin over that: import and `install()`": f"{_STOCK}\n{_INSTALL}",
    }
    for name in catalog.NAMES:
        source = _SCHEDULE.format(name=name, ranks=RANKS, microbatches=MICROBATCHES)
        programs[f"`{name}`: build, check, plan, digest"] = source
    sizes = {"ranks": RANKS, "microbatches": MICROBATCHES, "stages": 2 * RANKS}
    compiling = _COMPILE.format(**sizes)
    programs["`flex` on a V, not in the cache"] = (
        f"import os; os.environ['MEGATRON_PP_EXT_CACHE'] = '/dev/null'\n{compiling}"
    )
    programs["`flex` on a V, in the cache"] = compiling
    rows = [
        (what, f"{seconds(program, repeats):.3f}") for what, program in track(programs.items(), "measuring")
    ]
    lines = [
        "# What the plugin adds to the start of a rank",
        "",
        f"`python benchmarks/start_up.py --repeats {repeats}` on {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {date.today()}. "
        f"Schedules for p = {RANKS}, m = {MICROBATCHES}.",
        "",
        table(["what", "seconds"], rows),
    ]
    (RESULTS / "start_up.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
