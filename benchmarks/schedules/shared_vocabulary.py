"""The published gains of a shared vocabulary beside the simulator's.

    python -m benchmarks.schedules.shared_vocabulary

The paper's authors publish the MFU that their artifact measured on eight GPUs (arXiv 2411.05288;
github.com/sail-sg/VocabularyParallelism, artifact/example-results/full-exp.txt).  The same models are
simulated here, by multiplications alone.  Writes results/shared_vocabulary.md.
"""

from functools import partial
from itertools import combinations_with_replacement, pairwise

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.vocabulary import share

HIDDEN, LAYERS, MICROBATCHES, HOP = 3072, 32, 128, 0.05
"""The model of the artifact's runs, and the part of a rank's forward that a message is taken to last."""

PUBLISHED = {
    (2048, 32_000): (47.52, 47.52, 52.56),
    (2048, 64_000): (40.82, 49.15, 52.36),
    (2048, 128_000): (33.70, 44.12, 51.95),
    (2048, 256_000): (17.29, 38.21, 51.20),
    (4096, 32_000): (52.82, 52.81, 58.23),
    (4096, 64_000): (45.78, 53.81, 57.94),
    (4096, 128_000): (37.13, 49.56, 57.40),
    (4096, 256_000): (27.63, 42.45, 56.61),
}
"""(tokens of a sequence, rows) -> MFU in percent of 1F1B, of 1F1B with redistributed layers ("redis"), and of
1F1B with a shared vocabulary and one barrier ("vocab-2")."""


def output_layers(tokens: int, rows: int) -> float:
    """Return the output layer's work in layers of 12 products of hidden x hidden and two of attention."""
    return HIDDEN * rows / (12 * HIDDEN**2 + 2 * tokens * HIDDEN)


def makespan(name: str, ranks: int, layers: tuple[int, ...], output: float, is_shared: bool) -> float:
    """Return the length of a step in forwards of a layer."""
    build = partial(catalog.build, name, ranks)
    per_rank = sum(layers) / ranks
    stages = tuple(StageCosts(count, count, count, activation=count) for count in layers)
    costs = Costs(stages, hop=HOP * per_rank)
    if is_shared:
        return simulate(share(build, MICROBATCHES), costs.with_shared_output_layer(output, ranks)).makespan
    return simulate(build(MICROBATCHES), costs.with_output_layer(output)).makespan


def best_layout(ranks: int, output: float) -> tuple[int, ...]:
    """Return the layers of each stage of 1F1B with the least work on its slowest stage, the last included."""
    return min(
        (
            tuple(end - start for start, end in pairwise((0, *edges, LAYERS)))
            for edges in combinations_with_replacement(range(1, LAYERS), ranks - 1)
            if len(set(edges)) == ranks - 1
        ),
        key=lambda layers: (max(*layers[:-1], layers[-1] + output), layers[::-1]),
    )


def main(out: Out = RESULTS / "shared_vocabulary.md") -> None:
    """Simulate, and write the tables."""
    ranks = 8
    even = (LAYERS // ranks,) * ranks
    rows: list[Row] = []
    for (tokens, vocabulary), (base, redistributed, shared) in PUBLISHED.items():
        output = output_layers(tokens, vocabulary)
        steps = {
            "even": makespan("1f1b", ranks, even, output, False),
            "layout": makespan("1f1b", ranks, best_layout(ranks, output), output, False),
            "shared": makespan("1f1b", ranks, even, output, True),
        }
        gains = (
            redistributed / base,
            steps["even"] / steps["layout"],
            shared / base,
            steps["even"] / steps["shared"],
        )
        rows.append((tokens, f"{vocabulary // 1000}k", f"{output:.1f}", *(f"{gain:.2f}" for gain in gains)))
    head = (
        "tokens",
        "rows",
        "output / layer",
        "layout, published",
        "simulated",
        "shared, published",
        "simulated",
    )
    others: list[Row] = []
    for ranks in (8, 16, 32):
        for vocabulary in (32_000, 128_000, 256_000):
            output = output_layers(4096, vocabulary)
            whole = 3 * MICROBATCHES * (4 * ranks + output) / ranks
            for name in ("1f1b", "v-half"):
                stages = catalog.entry(name).placement(ranks).stages
                layers = (4 * ranks // stages,) * stages
                lengths = (
                    makespan(name, ranks, layers, output, is_shared) / whole for is_shared in (False, True)
                )
                others.append(
                    (ranks, f"{vocabulary // 1000}k", name, *(f"{length:.2f}" for length in lengths))
                )
    about = (
        f"1F1B, p = 8, m = {MICROBATCHES}, {LAYERS} layers of hidden size {HIDDEN}. Throughput over that of "
        f"1F1B with even stages. A message takes {HOP} of a rank's forward in the simulation, where F, I and "
        "W of a layer are equal. The published 2.96 compares with an even run that used 35.6 GB and had an "
        "MFU far below what its neighbours suggest."
    )
    more = (
        "Steps over perfectly shared work without a bubble, by simulation, with four layers of the same size "
        "on each rank and 4096 tokens."
    )
    sections = (
        table(head, rows),
        f"## More ranks\n\n{more}",
        table(("p", "rows", "schedule", "even", "shared"), others),
    )
    publish(out, "The published gains of a shared vocabulary, and the simulator's", about, *sections)


if __name__ == "__main__":
    typer.run(main)
