"""Does the partitioner scale, and does a stage take as long as it predicts?

    python -m benchmarks.planner.partition

Times the dynamic program on random chains, then profiles a small GPT on one CPU rank, cuts it for two,
trains it so with --pipeline-trace, and compares.  Writes results/partition.md in a few minutes.
"""

import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.measuring import RANKS, pretrain
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.partition import profile_file
from megatron_pp_ext.partition.layout import layout_of
from megatron_pp_ext.partition.partitioner import partition
from megatron_pp_ext.partition.profile import Layer, Profile
from megatron_pp_ext.partition.recurrence import Level
from megatron_pp_ext.schedule.actions import OF_STAGES, Kind
from megatron_pp_ext.view import trace_file

ROUNDS = 3
MODEL = shlex.split(
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 8000 "
    "--make-vocab-size-divisible-by 1 --mock-data --train-iters 4 --eval-iters 0 --eval-interval 1000 "
    "--global-batch-size 8"
)


def random_chain(layers: int) -> Profile:
    """Return a chain of layers with random times and sizes, always the same ones."""
    numbers = np.random.default_rng(0).random((layers, 4)).tolist()
    return Profile.chain(
        Layer(f"{at}", forward, 2 * backward, 1e7 * activation, 1e7 * parameters)
        for at, (forward, backward, activation, parameters) in enumerate(numbers)
    )


def speed() -> str:
    """Processor seconds of one core, for a random chain of 1,000 layers unless stated otherwise."""
    flat, nested = [Level(64, 1e8)], [Level(4, 1e9), Level(16, 1e8)]
    cases: list[tuple[str, int, list[Level], dict[str, Any]]] = [
        ("64 workers, links", 1000, flat, {"cost": "links"}),
        ("64 workers, paper", 1000, flat, {"cost": "paper"}),
        ("64 workers, reference", 1000, flat, {"cost": "reference"}),
        ("64 workers, paper, a limit of memory", 1000, flat, {"cost": "paper", "memory": 3e9}),
        ("64 workers, paper, straight", 1000, flat, {"cost": "paper", "straight": True}),
        ("16 machines of 4, paper", 1000, nested, {"cost": "paper"}),
        ("8 machines of 8, paper", 1000, [Level(8, 1e9), Level(8, 1e8)], {"cost": "paper"}),
        ("16 machines of 4, paper, 200 layers", 200, nested, {"cost": "paper"}),
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


def predictions() -> str:
    """Forward and backward of a microbatch on each of two stages, in seconds, and measured / predicted.

    The measured time is the median of the microbatches in a trace of two ranks.  The prediction is the sum of
    the layers of a stage, once as profiled on one rank before, from which the layout came, and once as
    profiled in the traced run itself: the two differ by what a busy neighbour does to a rank.
    """
    rows: list[Row] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            alone, together, traced = (Path(folder, name) for name in ("alone", "together", "traced"))
            pretrain([*MODEL, "--profile-pipeline", str(alone)], ranks=1)
            profile = profile_file.read(alone)
            found = partition(profile, [Level(RANKS, 1e10)], straight=True)
            layout = layout_of(found, profile)
            pipeline = [
                "--pipeline-model-parallel-size",
                str(RANKS),
                "--pipeline-model-parallel-layout",
                layout,
            ]
            files = ["--pipeline-trace", str(traced), "--profile-pipeline", str(together)]
            pretrain([*MODEL, *pipeline, *files])
            step, busy = trace_file.read(traced), profile_file.read(together)
        for number_of, (stage, record) in enumerate(zip(found.stages, step.records, strict=True)):
            spans = {
                kind: [e.end - e.start for e in record.events if e.action.kind is kind] for kind in OF_STAGES
            }
            measured = median(spans[Kind.F]) + median(spans[Kind.B])
            in_run = sum(busy.layers[at].seconds for at in stage.layers)
            ratios = (f"{seconds:.4f}: {measured / seconds:.2f}" for seconds in (stage.seconds, in_run))
            in_cell = layout.replace("|", r"\|")
            rows.append((number, in_cell, number_of, f"{measured:.4f}", *ratios))
            print(*rows[-1], file=sys.stderr, flush=True)
    predicted = ("predicted from one rank: ratio", "predicted in the same run: ratio")
    return table(("round", "layout", "stage", "measured", *predicted), rows)


def main(
    out: Out = RESULTS / "partition.md",
    only: Annotated[str, typer.Option(help="Only sections with this in their title.")] = "",
) -> None:
    """Measure and write the tables."""
    parts = {"Speed": speed, "Prediction": predictions}
    chosen = {title: part for title, part in parts.items() if only in title}
    publish(out, "Partitioner", "", *sections(chosen))


if __name__ == "__main__":
    typer.run(main)
