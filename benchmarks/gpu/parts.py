"""The parts of the GPU check: the measurements of each, and its seconds."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu import runs
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.features import FEATURES, Feature
from benchmarks.gpu.rows import FAILED, Cells, Rows
from benchmarks.gpu.sharing import CONTROL, shared_device
from benchmarks.measuring import MPP
from megatron_pp_ext.costs import system

KINDS = ("plain", "transformer-engine")
PROFILED = ("1f1b", "zb-h1", "v-half", "v-min")
BESIDE = ("products", "activations")
SLICES = ("2048", "4096", "8192")
"""The tokens of a slice, as words."""
LIKE = "h100"
"""The system whose figures are compared with the measured ones."""

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
    """Add the report of ``mpp doctor`` on the machine, its driver, and how ranks share its device."""

    def examined() -> Cells:
        return {"found": bench.run("doctor", [*MPP, "doctor"]).strip().splitlines()[0]}

    def driver() -> Cells:
        if shutil.which("nvidia-smi") is None:
            return {"found": "there is no nvidia-smi"}
        query = "--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.sm"
        return {"found": bench.run("nvidia-smi", ["nvidia-smi", query, "--format=csv,noheader"]).strip()}

    def sharing() -> Cells:
        with shared_device(bench):
            service = CONTROL if "CUDA_MPS_PIPE_DIRECTORY" in bench.environment else ""
            return {"found": f"{bench.backend} {service}".strip()}

    rows.measure("mpp doctor", examined)
    rows.measure("driver", driver)
    rows.measure("ranks share the device over", sharing)
    rows.measure(
        "torch.compile", lambda: {"found": "works" if bench.works("compile") else "fails, see compile.log"}
    )


def tests(bench: Bench, rows: Rows) -> None:
    """Add each test that is marked gpu, with its outcome."""
    with shared_device(bench):
        # pyproject.toml has -q, which takes one of the two away.
        options = shlex.split("-m pytest tests/gpu -m gpu -vv -rA -p no:cacheprovider")

        def all_have_ended() -> Cells:
            for line in bench.lines("tests", [sys.executable, *options]):
                if outcome_line := _OUTCOME.match(line):
                    name, outcome, reason = outcome_line.groups()
                    has_failed = {FAILED: outcome} if outcome in ("FAILED", "ERROR") else {}
                    rows.add(name, {"outcome": f"{outcome.lower()} {reason}".strip(), **has_failed})
            return {"outcome": "done"}

        rows.measure("all", all_have_ended)


def _layers(kind: str, names: tuple[str, ...], bench: Bench, rows: Rows, title: str = "{}") -> None:
    for name in names:
        measure = partial(bench.module, f"{kind}-{name}", "benchmarks.gpu.layers", kind, name)
        rows.measure(title.format(name), measure)


def beside(bench: Bench, rows: Rows) -> None:
    """Add the times of a layer's actions on one rank, and on two that share the device."""
    with shared_device(bench):
        for ranks in (1, 2):
            module = "benchmarks.gpu.beside", "--backend", bench.backend
            measure = partial(bench.ranks, f"beside-{ranks}", ranks, *module)
            rows.measure(f"TP {ranks}", measure)


def rates(bench: Bench, rows: Rows) -> None:
    """Add the figures of ``mpp calibrate`` next to the planner's, and the times of work during copies."""
    file = bench.logs / "system.json"

    def measured() -> Cells:
        bench.run("calibrate", [*MPP, "calibrate", str(file), "--like", LIKE, *["--cpu"] * bench.dry])
        return {}

    if rows.measure("mpp calibrate", measured):
        measured_system, planners = system.read(str(file)), system.read(LIKE)
        for name, (figure, planned) in _figures(measured_system, planners).items():
            cells = {"measured": f"{figure:.4g}", f"planner's ({LIKE})": f"{planned:.4g}"}
            rows.add(name, {**cells, "measured over planner's": f"{figure / planned:.3f}"})
    _layers("copies", BESIDE, bench, rows, "{} beside copies to the host")


def _figures(measured: system.System, planners: system.System) -> dict[str, tuple[float, float]]:
    """Return each figure that was measured, and the planner's without what training sustains of it."""
    clock = planners.sustained.get("clock", 1.0)
    figures = {
        f"product {m:.0f} x {n:.0f} x {k:.0f}, {name}, Tflop/s": (
            rate / 1e12,
            planners.rate(name, m, n, k) / clock / 1e12,
        )
        for name, products in measured.matrix_rates.items()
        for m, n, k, rate in products
    }
    for width, rate, around in measured.attention_rates:
        of_width = {row[0]: row[1:] for row in planners.attention_rates}[width]
        figures[f"attention, heads of {width:.0f}, Tflop/s"] = rate / 1e12, of_width[0] / 1e12
        figures[f"attention, heads of {width:.0f}, keys around"] = around, of_width[1]
    figures["copies within the device, GB/s"] = tuple(
        machine.copy_bytes_per_second / 1e9 for machine in (measured, planners)
    )
    if measured.host is not None and planners.host is not None and measured.host != planners.host:
        figures["copies to the host and back at once, GB/s each"] = tuple(
            machine.host.bytes_per_second / 1e9 for machine in (measured, planners)
        )
        figures["a tiny copy to the host and one back, us"] = tuple(
            machine.host.latency_seconds * 1e6 for machine in (measured, planners)
        )
    return figures


def parity(bench: Bench, rows: Rows) -> None:
    """Add the losses of ranks that share the device."""
    with shared_device(bench):
        runs.parity(bench, rows)


def _trained(name: str, feature: Feature, bench: Bench, rows: Rows) -> None:
    with shared_device(bench):
        feature.train(name, bench, rows)


def _one_queue(bench: Bench, rows: Rows) -> None:
    """Add the rows of ``away`` under the one hardware queue that the batch scripts set."""
    before, bench.environment = bench.environment, {**bench.environment, ONE_QUEUE: "1"}
    try:
        _layers("away", PROFILED, bench, rows)
    finally:
        bench.environment = before


ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"

PARTS = {
    "doctor": Part("What the machine has", 90, doctor),
    "tests": Part("Tests marked gpu", 240, tests),
    "split": Part("A cut backward", 90, partial(_layers, "split", KINDS), KINDS),
    "beside": Part("A layer's actions, and an I beside which products of a W run", 120, beside),
    "gaps": Part(
        "Gaps between kernels, rank 1 of 4 with made-up neighbours",
        90,
        partial(_layers, "gaps", PROFILED),
        PROFILED,
    ),
    "away": Part(
        "Steps with activations on the host, rank 1 of 4 with made-up neighbours",
        150,
        partial(_layers, "away", PROFILED),
        PROFILED,
    ),
    "away-one-queue": Part(
        "Steps with activations on the host and one hardware queue", 150, _one_queue, PROFILED
    ),
    "slices": Part(
        "A layer that works on slices of a sequence, by their tokens",
        120,
        partial(_layers, "prefix", SLICES),
        SLICES,
    ),
    "rates": Part("Rates of the device, and the planner's", 120, rates),
    "parity": Part("Losses from one checkpoint on, p = 4 on one device", 240, parity, tuple(runs.COMPARED)),
    "rehearse": Part(
        f"Rehearsed steps of Llama2-7B at p = {runs.RANKS}, m = {runs.MICROBATCHES}",
        240,
        runs.rehearse,
        tuple(runs.SCHEDULES),
    ),
    **{
        name: Part(feature.title, 240, partial(_trained, name, feature), tuple(feature.rows))
        for name, feature in FEATURES.items()
    },
}
