"""How much of a step does a shared vocabulary save?

    python -m benchmarks.runtime.vocabulary [--rounds 2] [--steps 2] [--hidden 256,512]

Trains GPTs with large vocabularies on two CPU ranks, a core each: with Megatron's own 1F1B and our schedules,
layers cut evenly, cut as the simulator likes best, and with the vocabulary shared by both ranks.  Runs take
turns.  Writes results/vocabulary.md.
"""

import re
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.measuring import COMMON, RANKS, in_turns, logged_seconds, pretrain, two_cores
from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.simulate import simulate

LAYERS, TOKENS, MICROBATCHES = 8, 64, 8
STOCK, EVEN, BEST, SHARED = "stock", "even", "best layout", "shared"
SYSTEMS = (
    *(("1f1b", how) for how in (STOCK, f"{STOCK}, {BEST}", SHARED)),
    *((name, how) for name in ("zb-h1", "v-half") for how in (EVEN, BEST, SHARED)),
)


def costs(layers: tuple[int, ...], head: float) -> Costs:
    """Return the costs of stages with so many ``layers`` each, where the output layer is worth ``head``."""
    # A stage without layers takes no time, which costs cannot be.
    stages = tuple(StageCosts(*[max(count, 1e-3)] * 3, activation=count) for count in layers)
    return Costs(stages).with_output_layer(head) if head else Costs(stages)


def head(hidden: int, vocabulary: int) -> float:
    """Return the multiplications of the output layer, where a layer's are 1.

    A layer has 12 products of hidden x hidden for each token, and two of its length x hidden.
    """
    return hidden * vocabulary / (12 * hidden**2 + 2 * TOKENS * hidden)


def cuts(stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut the layers into ``stages``, of which some may have none."""
    for edges in combinations_with_replacement(range(LAYERS + 1), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *edges, LAYERS)))


def even(stages: int) -> tuple[int, ...]:
    """Return equal numbers of layers."""
    return (LAYERS // stages,) * stages


def schedule_of(name: str, how: str) -> Schedule:
    """Return the schedule of a step."""
    build = partial(catalog.build, name, RANKS)
    return share(build, MICROBATCHES) if how == SHARED else build(MICROBATCHES)


def predicted(name: str, how: str, layers: tuple[int, ...], output: float) -> float:
    """Return the simulated step over one of perfectly shared work without a bubble; messages are free."""
    schedule = schedule_of(name, how)
    is_shared = how == SHARED
    of_stages = costs(layers, 0.0).with_split_head(output, RANKS) if is_shared else costs(layers, output)
    return simulate(schedule, of_stages).makespan / (3 * MICROBATCHES * (LAYERS + output) / RANKS)


def layers_of(name: str, how: str, output: float) -> tuple[int, ...]:
    """Return the layers of each stage."""
    stages = catalog.entry(name).placement(RANKS).stages
    if not how.endswith(BEST):
        return even(stages)
    return min(cuts(stages), key=partial(predicted, name, how, output=output))


def flags_of(name: str, how: str, layers: tuple[int, ...]) -> list[str]:
    """Return the flags of one way to train."""
    flags = [] if how.startswith(STOCK) else ["--pipeline-schedule", name]
    if how.endswith(BEST):
        flags += ["--pipeline-model-parallel-layout", "E" + "|".join("t" * count for count in layers) + "L"]
    return [*flags, "--pipeline-vocabulary", "shared"] if how == SHARED else flags


def model(hidden: int, vocabulary: int, steps: int) -> list[str]:
    """Return the flags of a run of ``steps`` steps."""
    return [
        *COMMON,
        *f"--num-layers {LAYERS} --hidden-size {hidden} --vocab-size {vocabulary}".split(),
        *f"--seq-length {TOKENS} --max-position-embeddings {TOKENS}".split(),
        *f"--global-batch-size {MICROBATCHES} --train-iters {steps}".split(),
        "--untie-embeddings-and-output-weights",
    ]


def rows_of(hidden: int, vocabulary: int, rounds: int, steps: int) -> list[Row]:
    """Return a row for each way to train a model of this size."""
    flags, output = model(hidden, vocabulary, steps + 1), head(hidden, vocabulary)
    layers = {system: layers_of(*system, output) for system in SYSTEMS}
    ways = {system: partial(pretrain, [*flags, *flags_of(*system, layers[system])]) for system in SYSTEMS}
    title = f"hidden {hidden}, vocabulary {vocabulary >> 10}k"
    logs = in_turns(ways, rounds, title=title)
    times = {
        system: [step for log in logs_of_system for step in logged_seconds(log)[-steps:]]
        for system, logs_of_system in logs.items()
    }
    stock = median(times["1f1b", STOCK])
    rows: list[Row] = []
    for (name, how), seconds in times.items():
        cut = "|".join(map(str, layers[name, how]))
        numbers = (median(seconds), min(seconds), median(seconds) / stock)
        expected = predicted(name, how, layers[name, how], output)
        rows.append((name, how, cut, *(f"{number:.3f}" for number in (*numbers, expected))))
    return rows


def memory_rows() -> list[Row]:
    """Return a row for each rank of four under V-Half: MiB of state and of activations, even and shared."""
    ranks, columns = 4, []
    v_half = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule v-half".split()
    for shared in ([], ["--pipeline-vocabulary", "shared"]):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            traced = [*v_half, *shared, "--pipeline-trace", str(trace)]
            log = pretrain([*model(256, 32 << 10, 2), *traced], ranks)
            peaks = [record.peak_bytes for record in trace_file.read(trace).records]
        parameter_lines = re.findall(r"parameters on .*model parallel rank \(([0-9, ]+)\): (\d+)", log)
        parameters = {int(place.split(",")[-1]): int(count) for place, count in parameter_lines}
        # Weight, gradient and two moments, each in single precision.
        columns.append([(16 * parameters[rank] / 2**20, peaks[rank] / 2**20) for rank in range(ranks)])
    rows: list[Row] = []
    for rank, of_rank in enumerate(zip(*columns, strict=True)):
        rows.append((rank, *(f"{value:.1f}" for pair in of_rank for value in (*pair, sum(pair)))))
    totals = [[sum(pair) for pair in column] for column in columns]
    spreads = [f"{max(total) - min(total):.1f}" for total in totals]
    rows.append(("highest less lowest", "", "", spreads[0], "", "", spreads[1]))
    return rows


def main(
    out: Out = RESULTS / "vocabulary.md",
    rounds: Annotated[int, typer.Option(help="Runs of each system, which take turns.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of a run that count, behind one to warm up.")] = 2,
    hidden: Annotated[str, typer.Option(help="Hidden sizes.")] = "256,512",
    vocabularies: Annotated[str, typer.Option(help="Rows of the vocabulary.")] = "8192,32768,131072",
) -> None:
    """Measure, and write a table for each size."""
    head_line = ("schedule", "how", "layers", "step", "least", "of stock's", "predicted")
    sections = []
    with two_cores():
        for size in map(int, hidden.split(",")):
            for rows in map(int, vocabularies.split(",")):
                rows_of_size = rows_of(size, rows, rounds, steps)
                sections += [
                    f"## Hidden size {size}, {rows >> 10}k rows",
                    f"The output layer is worth {head(size, rows):.1f} layers.",
                    table(head_line, rows_of_size),
                ]
    even_and_shared = [
        f"{quantity}, {how}" for how in (EVEN, SHARED) for quantity in ("state", "activations", "sum")
    ]
    sections += [
        "## Memory of the ranks",
        f"V-Half on four ranks, {LAYERS} layers of hidden size 256, 32k rows. MiB of weights, gradients and "
        "Adam's moments, and of activations at their peak, measured.",
        table(("rank", *even_and_shared), memory_rows()),
    ]
    about = (
        f"p = {RANKS}, m = {MICROBATCHES}, {LAYERS} layers, {TOKENS} tokens, untied, fp32. Seconds of a "
        f"step, with its optimizer: medians of {rounds} x {steps} steps, systems in turns. Layers are those "
        "of each stage. Predicted is the simulated step, by multiplications and without messages, over "
        "perfectly shared work without a bubble."
    )
    publish(out, "A vocabulary that all ranks share", about, *sections)


if __name__ == "__main__":
    typer.run(main)
