"""Does the partitioner scale, and does a stage take as long as it says?

    python benchmarks/partition.py

Times the dynamic programme on random chains, then profiles a small GPT on one CPU rank, cuts it for two,
trains it so with --pipeline-trace, and compares.  Writes benchmarks/results/partition.md in a few minutes.
"""

import inspect
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from megatron_pp_ext.partition import profile_file
from megatron_pp_ext.partition.layout import layout_of
from megatron_pp_ext.partition.partitioner import partition
from megatron_pp_ext.partition.profile import Layer, Profile
from megatron_pp_ext.partition.recurrence import Level
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.view import trace_file

RESULTS = Path(__file__).parent / "results"
RANKS, ROUNDS = 2, 3
MODEL = shlex.split(
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 8000 "
    "--make-vocab-size-divisible-by 1 --mock-data --train-iters 4 --eval-iters 0 --eval-interval 1000"
)


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def random_chain(layers: int) -> Profile:
    """Layers of random times and sizes, the same ones every time."""
    numbers = np.random.default_rng(0).random((layers, 4)).tolist()
    return Profile.chain(
        Layer(f"{at}", forward, 2 * backward, 1e7 * activation, 1e7 * parameters)
        for at, (forward, backward, activation, parameters) in enumerate(numbers)
    )


def speed() -> str:
    """Processor seconds of one core, a random chain of 1,000 layers unless said otherwise."""
    flat, nested = [Level(64, 1e8)], [Level(4, 1e9), Level(16, 1e8)]
    cases = [
        ("64 workers, paper", 1000, flat, {}),
        ("64 workers, reference", 1000, flat, {"cost": "reference"}),
        ("64 workers, paper, a limit of memory", 1000, flat, {"memory": 3e9}),
        ("64 workers, paper, straight", 1000, flat, {"straight": True}),
        ("16 machines of 4, paper", 1000, nested, {}),
        ("8 machines of 8, paper", 1000, [Level(8, 1e9), Level(8, 1e8)], {}),
        ("16 machines of 4, paper, 200 layers", 200, nested, {}),
    ]
    rows = []
    for name, layers, levels, options in cases:
        profile = random_chain(layers)
        start = time.process_time()
        found = partition(profile, levels, **options)
        seconds = time.process_time() - start
        rows.append((name, f"{seconds:.1f}", f"{found.bottleneck_seconds:.4g}", f"{found.speedup:.2f}"))
        print(*rows[-1], file=sys.stderr, flush=True)
    return table(("case", "processor s", "bottleneck s", "speedup over data parallelism"), rows)


def run(ranks: int, microbatches: int, *flags: str) -> None:
    """Train the model on CPU ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "megatron_pp_ext.pretrain_gpt", "--cpu", *MODEL, *flags]
    command += ["--pipeline-model-parallel-size", str(ranks), "--global-batch-size", str(microbatches)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)


def predictions() -> str:
    """Forward and backward of a microbatch on each of two stages, in seconds, and measured / predicted.

    Measured is the trace of two ranks: the median of a step's microbatches.  Predicted are the sums of the
    layers of a stage, profiled on one rank before, from which the layout came, and profiled in the very run
    that was traced: the second differs from the first by what a busy neighbour does to a rank.
    """
    rows: list[tuple[object, ...]] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            alone, together, traced = (Path(folder, name) for name in ("alone", "together", "traced"))
            run(1, 8, "--profile-pipeline", str(alone))
            profile = profile_file.read(alone)
            found = partition(profile, [Level(RANKS, 1e10)], straight=True)
            layout = layout_of(found, profile)
            watched = ["--pipeline-trace", str(traced), "--profile-pipeline", str(together)]
            run(RANKS, 8, "--pipeline-model-parallel-layout", layout, *watched)
            step, busy = trace_file.read(traced), profile_file.read(together)
        for number_of, (stage, record) in enumerate(zip(found.stages, step.records, strict=True)):
            spans = {kind: [e.end - e.start for e in record.events if e.action.kind is kind] for kind in Kind}
            measured = median(spans[Kind.F]) + median(spans[Kind.B])
            in_run = sum(busy.layers[at].seconds for at in stage.layers)
            ratios = (f"{said:.4f}: {measured / said:.2f}" for said in (stage.seconds, in_run))
            in_cell = layout.replace("|", r"\|")
            rows.append((number, in_cell, number_of, f"{measured:.4f}", *ratios))
            print(*rows[-1], file=sys.stderr, flush=True)
    predicted = ("predicted from one rank: ratio", "predicted in the same run: ratio")
    return table(("round", "layout", "stage", "measured", *predicted), rows)


def main() -> None:
    """Write the report."""
    where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.0f}"
    parts = [
        "# Partitioner",
        f"`python benchmarks/partition.py` on {where}, Python {platform.python_version()}, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
    ]
    for title, section in {"Speed": speed, "Prediction": predictions}.items():
        text = section()
        parts += [f"## {title}", inspect.cleandoc(section.__doc__ or ""), text]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "partition.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
