"""Which commands take longer in this checkout than in another one, in processor time?

    git worktree add ../before COMMIT
    python -m benchmarks.planner.two_checkouts ../before

Each command runs in both checkouts by turns, and its number is the median of what a turn here took over what
it took there, so that another load of the machine meets both.  Each checkout has caches of its own, which a
first turn fills; "cold" is without compiled schedules.  Writes results/two_checkouts.md.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.measuring import in_turns
from benchmarks.report import RESULTS, Out, publish, table
from reference import vgg16

HERE = Path(__file__).parents[2]
EIGHT = "--gpus 8 --global-batch-size 64 --seq-length 4096 --model llama3-8b"
COMMANDS = (
    "list",
    "schedule v-half -p 8 -m 32",
    "schedule v-half -p 16 -m 128",
    "schedule v-zb -p 8 -m 32 --shared-vocabulary --output-layer 0.7",
    "schedule v-zb -p 8 -m 32 --csv order.csv",
    "simulate order.csv --f 20 --i 22 --w 14 --hop 1",
    "schedule v-half -p 8 -m 32 --trace step.json",
    "trace step.json",
    "compare -p 4 -m 8",
    "compare -p 8 -m 32",
    "schedule flex -p 4 -m 8 --memory-limit 0.75 --f 20 --i 22 --w 14 --hop 1",
    "schedule flex -p 8 -m 24 --memory-limit 0.5 --f 20 --i 22 --w 14 --hop 1",
    "schedule flex -p 4 -m 10 --memory-limit 0.8 --pair-time 0.8",
    "models",
    "estimate --model llama3-8b -- --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --pipeline-schedule v-half --micro-batch-size 1 --global-batch-size 64",
    f"search {EIGHT} --schedules 1f1b,zb-h1,v-half --layout even -- --micro-batch-size 1",
    f"search {EIGHT} --schedules 1f1b,zb-h1,v-half -- --micro-batch-size 1",
    "search --gpus 64 --global-batch-size 128 --seq-length 8192 --model llama3-70b -- "
    "--tensor-model-parallel-size 8 --sequence-parallel",
    "partition vgg16.txt --workers 8 --bandwidth 1.25e9",
    "schedule v-haif -p 8 -m 32",
    "estimate --model llama3-8b -- --pipeline-modle-parallel-size 4",
)
"""Commands of ``mpp``; the last two are typing errors."""

START = "from megatron_pp_ext.cli import app; app()"
FUNCTIONS = """
import resource
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
def run():
    schedule = catalog.build({name!r}, {ranks}, {microbatches})
    check(schedule)
    costs = Costs((StageCosts(20.0, 22.0, 14.0),) * schedule.placement.stages, 1.0)
    timeline = simulate(schedule, costs)
    return timeline.makespan, timeline.peak_memory, timeline.peak_messages
run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
for _ in range({repeats}):
    run()
print((resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) / {repeats})
"""
SIZES = (("1f1b", 8, 32), ("v-half", 8, 32), ("v-half", 16, 128), ("zb-h1", 8, 64), ("interleaved", 8, 64),
         ("dualpipe-v", 8, 32))  # fmt: skip


class Checkout:
    """A checkout with caches and a folder of its own."""

    def __init__(self, sources: Path, folder: Path) -> None:
        self._cache, self._folder = folder / "schedules", folder / "work"
        self._folder.mkdir(parents=True)
        (self._folder / "vgg16.txt").write_text(vgg16.graph_txt())
        caches = {"MEGATRON_PP_EXT_CACHE": self._cache, "NUMBA_CACHE_DIR": folder / "loops"}
        self._environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environment |= {name: str(path) for name, path in caches.items()}

    def command(self, words: str, is_cold: bool = False) -> float:
        """Return the seconds of the processor, without the system's, that ``mpp`` takes."""
        if is_cold:
            shutil.rmtree(self._cache, ignore_errors=True)
        child = self._python(START, *shlex.split(words))
        _, status, used = os.wait4(child.pid, 0)
        if status and words not in COMMANDS[-2:]:
            raise RuntimeError(f"mpp {words} ended with status {status}")
        return used.ru_utime

    def functions(self, name: str, ranks: int, microbatches: int) -> float:
        """Return the seconds of building, checking and simulating a schedule, once it was done before."""
        repeats = max(3, 30_000 // (ranks * microbatches))
        program = FUNCTIONS.format(name=name, ranks=ranks, microbatches=microbatches, repeats=repeats)
        return float(self._python(program).communicate()[0])

    def _python(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        start = [sys.executable, "-P", "-c", program, *words]
        return subprocess.Popen(
            start, stdout=subprocess.PIPE if not words else subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=self._folder, env=self._environment,
        )  # fmt: skip


def main(
    before: Annotated[Path, typer.Argument(help="The other checkout.")],
    out: Out = RESULTS / "two_checkouts.md",
    turns: Annotated[int, typer.Option(help="Turns of each command.")] = 7,
    only: Annotated[str, typer.Option(help="A word of the commands to measure.")] = "",
) -> None:
    """Measure and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            Checkout(sources.resolve(), Path(folder, name))
            for name, sources in (("there", before), ("here", HERE))
        )

        ways = {}
        for words in COMMANDS:
            ways[f"`mpp {words}`"] = partial(Checkout.command, words=words)
            if "flex" in words:
                ways[f"`mpp {words}`, cold"] = partial(Checkout.command, words=words, is_cold=True)
        for name, p, m in SIZES:
            of_size = partial(Checkout.functions, name=name, ranks=p, microbatches=m)
            ways[f"`{name}`, p = {p}, m = {m}: build, check, simulate"] = of_size
        rows = []
        for what, way in track(ways.items(), "measuring"):
            if only not in what:
                continue
            runs = {"before": partial(way, old), "now": partial(way, new)}
            seconds_of_way = in_turns(runs, turns, warm_up=1)
            ratio = median(now / before for before, now in zip(*seconds_of_way.values(), strict=True))
            rows.append(
                (what, *(f"{median(seconds):.3g}" for seconds in seconds_of_way.values()), f"{ratio:.2f}")
            )
            print(*rows[-1], flush=True, file=sys.stderr)
    publish(out, "Two checkouts", "", table(["command", "seconds before", "seconds now", "ratio"], rows))


if __name__ == "__main__":
    typer.run(main)
