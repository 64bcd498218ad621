"""The parts of the GPU check: what each measures, and in how many seconds."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu import runs
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rows import FAILED, Cells, Rows
from benchmarks.gpu.sharing import CONTROL, shared_device
from benchmarks.measuring import MPP

KINDS = ("plain", "transformer-engine")
PROFILED = ("1f1b", "zb-h1", "v-half")

_OUTCOME = re.compile(r"^tests/(?:\S+/)?(\S+::\S+) (PASSED|FAILED|SKIPPED|ERROR)\s*(.*?)\s*(?:\[ *\d+%\])?$")


@dataclass(frozen=True, slots=True)
class Part:
    """A table: its title, the seconds in which it has to be done, what adds its rows, and their names.

    Rows can only be chosen where they are named here.
    """

    title: str
    seconds: float
    run: Callable[[Bench, Rows], None]
    rows: tuple[str, ...] = ()


def doctor(bench: Bench, rows: Rows) -> None:
    """Add what ``mpp doctor`` says of the machine, its driver, and how ranks share its device."""

    def examined() -> Cells:
        return {"found": bench.run("doctor", [*MPP, "doctor"]).strip().splitlines()[-1]}

    def driver() -> Cells:
        if shutil.which("nvidia-smi") is None:
            return {"found": "there is no nvidia-smi"}
        asked = "--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.sm"
        return {"found": bench.run("nvidia-smi", ["nvidia-smi", asked, "--format=csv,noheader"]).strip()}

    def sharing() -> Cells:
        with shared_device(bench):
            service = CONTROL if "CUDA_MPS_PIPE_DIRECTORY" in bench.environment else ""
            return {"found": f"{bench.backend} {service}".strip()}

    rows.measure("mpp doctor", examined)
    rows.measure("driver", driver)
    rows.measure("ranks share the device over", sharing)
    rows.measure(
        "torch.compile", lambda: {"found": "works" if bench.compiles() else "fails, see compile.log"}
    )


def tests(bench: Bench, rows: Rows) -> None:
    """Add each test that is marked gpu, with its outcome."""
    with shared_device(bench):
        # pyproject.toml has -q, which takes one of the two away.
        options = shlex.split("-m pytest tests/gpu -m gpu -vv -rA -p no:cacheprovider")

        def all_have_ended() -> Cells:
            for line in bench.lines("tests", [sys.executable, *options]):
                if found := _OUTCOME.match(line):
                    name, outcome, why = found.groups()
                    has_failed = {FAILED: outcome} if outcome in ("FAILED", "ERROR") else {}
                    rows.add(name, {"outcome": f"{outcome.lower()} {why}".strip(), **has_failed})
            return {"outcome": "done"}

        rows.measure("all", all_have_ended)


def _layers(what: str, names: tuple[str, ...], bench: Bench, rows: Rows) -> None:
    for name in names:
        rows.measure(name, partial(bench.module, f"{what}-{name}", "benchmarks.gpu.layers", what, name))


def parity(bench: Bench, rows: Rows) -> None:
    """Add the losses of ranks that share the device."""
    with shared_device(bench):
        runs.parity(bench, rows)


PARTS = {
    "doctor": Part("What the machine has", 90, doctor),
    "tests": Part("Tests marked gpu", 240, tests),
    "split": Part("A cut backward", 90, partial(_layers, "split", KINDS), KINDS),
    "gaps": Part(
        "Gaps between kernels, rank 1 of 4 with made-up neighbours",
        90,
        partial(_layers, "gaps", PROFILED),
        PROFILED,
    ),
    "parity": Part("Losses from one checkpoint on, p = 4 on one device", 240, parity, tuple(runs.COMPARED)),
    "rehearse": Part(
        f"Rehearsed steps of Llama2-7B at p = {runs.RANKS}, m = {runs.MICROBATCHES}",
        240,
        runs.rehearse,
        tuple(runs.SCHEDULES),
    ),
}
