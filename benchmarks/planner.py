"""How far can the planner's models be trusted, and how fast is its search?

python benchmarks/planner.py        # 10 minutes of two cores; writes benchmarks/results/planner.md
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import published_runs
import typer
from published_runs import FAMILIES, GRID, GRID_ASSUMPTIONS, LLAMA, RUNS, ranked
from tables import Row, table

ROOT = Path(__file__).parents[1]

GPT3 = {
    "num_layers": 96,
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "bf16": True,
}


def main(
    out: Annotated[Path, typer.Option(help="The tables.")] = ROOT / "benchmarks/results/planner.md",
    measured: Annotated[bool, typer.Option(help="Also run the twelve trainings.")] = True,
) -> None:
    """Write the tables."""
    # First, while this process is small: what it forks counts as large as it is itself.
    search = speed()
    day = datetime.now(UTC).date()
    parts = [
        "# What the planner says, and what was measured",
        f"`python benchmarks/planner.py`, {day}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}. Nothing is fitted to the figures below.",
        *(activations() if measured else ()),
        *megatron_steps(),
        *grid(),
        *llama(),
        *search,
    ]
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def activations() -> list[str]:
    """The recorder's peaks in training runs on the CPU."""
    for folder in ("tests", "tests/integration"):
        sys.path.insert(0, str(ROOT / folder))
    from megatron_pp_ext.integration import install
    from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda)

    install()
    from tests.integration import test_planner_memory as runs

    rows: list[Row] = []
    for name, (count, flags) in runs.CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            seen = runs.measured(count, flags, Path(folder))
        said = runs.predicted(count, flags)
        worst = max((ours / theirs - 1 for ours, theirs in zip(said, seen, strict=True)), key=abs)
        peaks = [" ".join(f"{value / 1024:,.0f}" for value in values) for values in (seen, said)]
        rows.append((name, *peaks, f"{worst:+.1%}"))
    return [
        "## Peaks of activations, in KiB rank by rank",
        "Tiny GPTs on the CPU; measured by the recorder, which counts what autograd and deferred weight "
        "gradients keep (`tests/integration/test_planner_memory.py`).",
        table(("configuration", "measured", "predicted", "largest error"), rows),
    ]


def megatron_steps() -> list[str]:
    """Seconds of a step of arXiv 2205.05198."""
    rows: list[Row] = []
    savings = []
    for run in RUNS:
        row: list[object] = [run.name]
        steps = [published_runs.megatron_step(run, selective).step_seconds for selective in (False, True)]
        savings.append(abs(steps[0] / steps[1] / (run.full / run.selective) - 1))
        for selective, seconds in ((False, run.full), (True, run.selective)):
            found = published_runs.megatron_step(run, selective)
            error = found.step_seconds / seconds - 1
            row += [seconds, f"{found.step_seconds:.2f}", f"{error:+.1%}", f"{found.fullest.total / 1e9:.0f}"]
        rows.append(row)
    columns = ("published s", "predicted s", "error", "predicted GB")
    head = ("model", *(f"{recompute}: {column}" for recompute in ("full", "selective") for column in columns))
    return [
        "## Steps of arXiv 2205.05198, table 5",
        "A100 80G, tensor parallelism 8. The shipped rate of a product is that of the best shape and memory "
        "moves at the data sheet's rate, so that every step comes out too short by about as much; `mpp "
        "calibrate` measures a machine's own. What selective recomputation saves is told within "
        f"{max(savings):.1%}.",
        table(head, rows),
    ]


def grid() -> list[str]:
    """The best of the grid search of arXiv 2405.15362."""
    parts = [
        "## Which schedule wins for 98.5B (arXiv 2405.15362)",
        f"MFU in percent of the best configuration of each. Assumed: {GRID_ASSUMPTIONS}. The utilisation "
        "comes out far too high: some of it as in the table above; whether the rest is network, "
        "kernels or the assumptions is not known.",
    ]
    for length, published in GRID.items():
        found = {name: published_runs.best_of_grid(length, family) for name, family in FAMILIES.items()}
        said = {name: 100 * one.estimate.utilisation for name, one in found.items()}
        rows = [
            (name, published[name], f"{said[name]:.2f}", one.candidate.name, f"{size / 1e9:.1f}")
            for name, one in found.items()
            for size in (one.estimate.fullest.total,)
        ]
        winners = {
            batch: ranked(
                {
                    name: published_runs.best_of_grid(length, family, batch).estimate.utilisation
                    for name, family in FAMILIES.items()
                }
            )[-1]
            for batch in (80, 320)
        }
        others = ", ".join(f"{winner} with batches of {batch}" for batch, winner in winners.items())
        parts += [
            f"Sequences of {length:,}:",
            table(("schedule", "published", "predicted", "predicted configuration", "GB"), rows),
            f"{_orders(published, said)} The predicted winner is {others}.",
        ]
    return parts


def llama() -> list[str]:
    """Llama2-7B on a node of MI300X."""
    found = {name: published_runs.llama_step(schedule) for name, (schedule, _, _) in LLAMA.items()}
    speed = {name: one.tokens_per_second / 8 for name, one in found.items()}
    memory = {name: one.fullest.total / 1e9 for name, one in found.items()}
    rows = [
        (name, rate, f"{speed[name]:.0f}", size, f"{memory[name]:.1f}")
        for name, (_, rate, size) in LLAMA.items()
    ]
    return [
        "## Llama2-7B on 8 MI300X",
        "Sequences of 4,096 in microbatches of 1, 64 of them, are assumed; the published memory is of less "
        "activation a microbatch than that, so that only the orders can be compared.",
        table(("schedule", "published tokens/s a GPU", "predicted", "published GB", "predicted"), rows),
        "Throughput: " + _orders({name: rate for name, (_, rate, _) in LLAMA.items()}, speed),
        "Memory: " + _orders({name: size for name, (_, _, size) in LLAMA.items()}, memory),
    ]


def speed() -> list[str]:
    """A search of everything for 175B on 1,024 GPUs, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model, numbers = Path(folder, "model.json"), Path(folder, "found.json")
        model.write_text(json.dumps(GPT3), encoding="utf-8")
        command = ["search", "--gpus", 1024, "--global-batch-size", 1536, "--seq-length", 2048, "--system"]
        words = [*map(str, command), "a100-80g", "--model", str(model), "--json", str(numbers)]
        code = "from megatron_pp_ext.cli import app; app()"
        environment = {**os.environ, "MEGATRON_PP_EXT_CACHE": folder}
        child = subprocess.Popen([sys.executable, "-c", code, *words], env=environment)
        _, _, used = os.wait4(child.pid, 0)
        found = json.loads(numbers.read_text(encoding="utf-8"))
    rows = [
        (one["name"], f"{one['estimate']['step_seconds']:.3f}", f"{one['estimate']['utilisation']:.1%}")
        for one in found["best"]
    ]
    return [
        "## A search of everything",
        f"175B, 1,024 A100, batches of 1,536 sequences of 2,048: {found['legal']:,} configurations, of which "
        f"{found['unfit']:,} cannot fit and {found['replayed']:,} were replayed, took "
        f"{used.ru_utime + used.ru_stime:.0f} s of one core (user and system) and "
        f"{used.ru_maxrss / 2**20:.2f} GiB, two compilations of flex included.",
        table(("configuration", "step s", "MFU"), rows),
    ]


def _orders(published: dict[str, float], said: dict[str, float]) -> str:
    ours, theirs = ranked(said), ranked(published)
    lead = said[ours[-1]] / said[ours[-2]] - 1
    if ours == theirs:
        return f"The order is the published one: {' < '.join(theirs)}."
    winner = "right" if ours[-1] == theirs[-1] else "**wrong**"
    return (
        f"Published: {' < '.join(theirs)}; predicted: {' < '.join(ours)}. The winner is {winner}, "
        f"by {lead:.1%} of the second."
    )


if __name__ == "__main__":
    typer.run(main)
