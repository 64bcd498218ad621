"""Which formula of the partitioner cuts best, by a judge that plays the pipeline?

python -m benchmarks.planner.cuts        # half a minute of a core; writes results/cuts.md
"""

from collections.abc import Iterator

import numpy as np
import typer

from benchmarks.planner.links_judge import seconds, stages_of
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.partition import graph_txt
from megatron_pp_ext.partition.cost_formulas import FORMULAS
from megatron_pp_ext.partition.partitioner import partition
from megatron_pp_ext.partition.profile import Layer, Profile
from megatron_pp_ext.partition.recurrence import Level
from reference import vgg16

MICROBATCHES = 960
CHAINS = 10
_WORSE = 1.01
"""The part by which a cut has to take longer than the best of the three to count as worse."""


def chain(seed: int, layers: int = 12) -> Profile:
    """Return a chain of layers with random times and sizes, the same ones for the same seed."""
    numbers = np.random.default_rng(seed).random((layers, 4)).tolist()
    return Profile.chain(
        Layer(f"{at}", forward, 2 * backward, 1e7 * activation, 1e8 * parameters)
        for at, (forward, backward, activation, parameters) in enumerate(numbers)
    )


def cases() -> Iterator[tuple[str, Profile, int, float]]:
    """Yield models with numbers of workers and bytes a second of their links."""
    models = [("VGG-16", graph_txt.read(vgg16.graph_txt()), (1e9, 3.125e9, 1.25e10))]
    models += [(f"chain {seed}", chain(seed), (1e7, 1e8, 1e9)) for seed in range(CHAINS)]
    for name, profile, bandwidths in models:
        for workers in (4, 8, 16):
            for bandwidth in bandwidths:
                yield name, profile, workers, bandwidth


def judged() -> str:
    """Milliseconds for one of 960 microbatches, with the replicas of the stages that each formula chose.

    VGG-16 is PipeDream's published profile; the chains are 12 layers of random times and sizes.  A cut is
    worse where it takes more than 1% longer than the best of the three.
    """
    rows: list[Row] = []
    ratios: dict[str, list[float]] = {cost: [] for cost in FORMULAS}
    for name, profile, workers, bandwidth in cases():
        found = {cost: partition(profile, [Level(workers, bandwidth)], cost=cost) for cost in FORMULAS}
        took = {
            cost: seconds(stages_of(profile, one), bandwidth, MICROBATCHES) / MICROBATCHES
            for cost, one in found.items()
        }
        best = min(took.values())
        for cost, each in took.items():
            ratios[cost].append(each / best)
        cells = [f"{1e3 * took[cost]:.4g} ({'-'.join(map(str, found[cost].replicas))})" for cost in FORMULAS]
        rows.append((name, workers, f"{bandwidth:.3g}", *cells))
    worse = [
        f"worse in {sum(one > _WORSE for one in own)} of {len(own)}, at most {max(own):.2f} times the best"
        for own in ratios.values()
    ]
    rows.append(("all", "", "", *worse))
    return table(("model", "workers", "bytes a second", *FORMULAS), rows)


def main(out: Out = RESULTS / "cuts.md") -> None:
    """Write the page."""
    about = "Links send and receive at once, and rings of replicas reduce gradients behind the work."
    publish(out, "Cuts for pipelines without a flush", about, *sections({"By the judge": judged}))


if __name__ == "__main__":
    typer.run(main)
