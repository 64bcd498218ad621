"""Long sequences: what context parallelism, slices of sequences, and both together are estimated to take.

python -m benchmarks.planner.long_context        # writes results/long_context.md
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import RESULTS, Out, publish, table

MODELS = {
    "llama3-8b": 32,
    "llama3-70b": 64,
    "qwen3-30b-a3b": 32,
    "qwen3-next-80b": 64,
    "deepseek-v3": 256,
}
"""The models, and the H100 that each has."""

LENGTHS = 8192, 32768, 131072, 524288, 1048576
"""Tokens of a sequence."""

TOKENS = 4 * 2**20
"""Tokens of a step; a step has no fewer sequences than ``FEWEST``."""

FEWEST = 8

WAYS = {
    "context parallelism": (),
    "slices": ("--context-parallel-size", "1", "--pipeline-slice-tokens", "auto"),
    "both": ("--pipeline-slice-tokens", "auto"),
}
"""What a search may use, as the flags that it gets.  Each may also use neither."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job, and the best candidate of a search for each of ``WAYS``, None where none fits."""

    model: str
    gpus: int
    length: int
    best: tuple[dict[str, Any] | None, ...]

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return batch(self.length)


def batch(length: int) -> int:
    """Return the sequences of a step whose sequences have ``length`` tokens."""
    return max(FEWEST, TOKENS // length)


def command(model: str, gpus: int, length: int, seconds: float, flags: Sequence[str]) -> list[str]:
    """Return the search for a job, which may take so many ``seconds`` of a processor."""
    words = ["search", "--model", model, "--gpus", str(gpus), "--seq-length", str(length)]
    words += ["--global-batch-size", str(batch(length)), "--cpu-seconds", f"{seconds:g}"]
    words += ["--no-ask", "--top", "1"]
    return [*words, *(("--", *flags) if flags else ())]


def searched(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the best candidate of a search, as in its file; None where nothing fits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "best.json")
        at = words.index("--") if "--" in words else len(words)
        line = [*words[:at], "--json", str(file), *words[at:]]
        program = [sys.executable, "-m", "megatron_pp_ext.cli", *line]
        result = subprocess.run(program, capture_output=True, text=True, check=False)
        print(f"mpp {shlex.join(words)}: status {result.returncode}", file=sys.stderr, flush=True)
        if not file.exists():
            return None
        best: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["best"]
        return best[0] if best else None


def main(
    models: Annotated[str, typer.Option(help="Names, with commas between.")] = ",".join(MODELS),
    lengths: Annotated[str, typer.Option(help="Numbers of tokens, with commas between.")] = ",".join(
        map(str, LENGTHS)
    ),
    seconds: Annotated[float, typer.Option(help="Seconds of a processor for each search.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Searches at a time.")] = 2,
    out: Out = RESULTS / "long_context.md",
) -> None:
    """Search for each job in each way, and write the table."""
    jobs = [
        (model, MODELS[model], int(length)) for model in models.split(",") for length in lengths.split(",")
    ]
    lines = [command(*job, seconds, flags) for job in jobs for flags in WAYS.values()]
    with ThreadPoolExecutor(workers) as pool:
        best = list(pool.map(searched, lines))
    step = len(WAYS)
    rows = [Row(*job, tuple(best[step * n : step * n + step])) for n, job in enumerate(jobs)]
    head = ["model", "H100", "tokens", "sequences", *(f"{way}: s, GB" for way in WAYS), "shortest"]
    text = table(head, [list(cells(row)) for row in rows])
    commands = "\n".join(f"mpp {shlex.join(line)}" for line in lines)
    about = (
        "Each cell is the best of one search: seconds of a step, GB on the fullest rank, and its layout.  "
        "Estimates, not measurements."
    )
    publish(out, "Long sequences", about, text, f"## The searches\n\n```bash\n{commands}\n```")


def cells(row: Row) -> Iterator[object]:
    """Yield the cells of a row of the table."""
    yield from (row.model, row.gpus, row.length, row.batch)
    fitting = dict[str, float]()
    for way, best in zip(WAYS, row.best, strict=True):
        if best is None:
            yield "nothing fits"
            continue
        fitting[way] = best["estimate"]["step_seconds"]
        fullest = max(sum(rank.values()) for rank in best["estimate"]["ranks"])
        yield f"{fitting[way]:.4g}, {fullest / 1e9:.0f}: {best['name']}"
    yield min(fitting, key=fitting.__getitem__) if fitting else "-"


if __name__ == "__main__":
    typer.run(main)
