"""How good are compiled schedules?  Writes results/schedules.md and results/schedules.png.

    python benchmarks/schedules.py

One process, no GPU; about a quarter of an hour on one core.  Every compiled schedule is simulated by
``schedule.simulate``; nothing comes from the cache.
"""

import inspect
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path.append(str(HERE.parent / "tests" / "schedule"))

from costs import memory_limited, table5, torchs, unequal_costs  # noqa: E402
from frontier import frontiers  # noqa: E402
from goals import best_known, closed_forms, published  # noqa: E402
from tables import UNEQUAL, Row, table  # noqa: E402


def speed() -> str:
    """Time and memory of whole processes that compile one schedule."""
    rows: list[Row] = []
    for p, m, limit, times in ((16, 64, 12, UNEQUAL), (16, 64, 18, UNEQUAL), (64, 512, 44, UNEQUAL)):
        program = (
            "from megatron_pp_ext.compiler.compile import compile_schedule; "
            "from megatron_pp_ext.schedule.costs import Costs; "
            "from megatron_pp_ext.schedule.placement import v; "
            f"costs = Costs.uniform(v({p}), forward={times[0]}, input_gradient={times[1]}, "
            f"weight_gradient={times[2]}, hop={times[3]}); "
            f"found = compile_schedule({p}, {m}, costs, {limit}); "
            "print(found.timeline.makespan, found.lower_bound, found.origin, sep='; ')"
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        makespan, bound, origin = run.stdout.strip().split("; ")
        rows.append((p, m, times, limit, makespan, bound, origin, f"{seconds:.1f}", after.ru_maxrss // 1024))
    head = (
        "p",
        "m",
        "F, I, W, hop",
        "limit",
        "makespan",
        "lower bound",
        "origin",
        "processor s",
        "MiB so far",
    )
    return table(head, rows)


def machine() -> str:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        name = models[0] if models else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores (one used), Python {platform.python_version()}"


def main() -> None:
    """Write the report."""
    RESULTS.mkdir(exist_ok=True)
    sections = {
        "Speed": speed,
        "Best known makespans": best_known,
        "Published schedules at unit cost": published,
        "Closed forms at unit cost, p = 2..16, m = p..8p": closed_forms,
        "Other costs, p = 8, m = 16": unequal_costs,
        "torch.distributed.pipelining, p = 8, m = 16": torchs,
        "Bubble rates of arXiv 2401.10241, table 5": table5,
        "The same pipelines under a memory limit": memory_limited,
        "Frontier": lambda: frontiers(RESULTS / "schedules.png"),
    }
    parts = [
        "# Compiled schedules",
        f"`python benchmarks/schedules.py` on {machine()}, {datetime.now(UTC):%Y-%m-%d}.  "
        "Lengths are makespans, first start to last end over all ranks, unless a column says span.  "
        "Times are those of one chunk's action.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_PP_EXT_CACHE"] = folder
        for title, section in sections.items():
            start = time.process_time()
            text = section()
            print(f"{title}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
            about = inspect.cleandoc(section.__doc__ or "![frontier](schedules.png)")
            parts += [f"## {title}", about, text]
    (RESULTS / "schedules.md").write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
