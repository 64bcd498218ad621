"""Which formula of `mpp partition --cost` cuts best, as a simulation of full-duplex links judges?

    python -m benchmarks.planner.partition_costs

Plays the cut of each formula with tests/support/link_judge.py, which knows none of them: 10 models on 4, 8
and 16 workers at four bandwidths.  Writes results/partition_costs.md in a minute or two of one core.
"""

import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean

import typer

from benchmarks.planner.chains import profiles
from benchmarks.report import RESULTS, Out, publish, sections, table
from megatron_pp_ext.pipedream.partition.cost_formulas import FORMULAS
from megatron_pp_ext.pipedream.partition.partitioner import Partition, partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from tests.support.link_judge import seconds_of_a_microbatch, stages_of

WORKERS = (4, 8, 16)
BANDWIDTHS = (1e9, 3.125e9, 1.25e10, 5e10)
DEPTHS = (1, 4, 16)
"""How many times as many microbatches are in flight as PipeDream keeps."""

NOISE = 1.005
"""A cut is worse than another where it takes this many times its seconds; less may come from a run's ends."""


@dataclass(frozen=True)
class Case:
    """A model on some workers: the cut of each formula, and the judge's seconds of a microbatch by depth."""

    model: str
    workers: int
    bandwidth: float
    cuts: dict[str, Partition]
    seconds: dict[str, dict[int, float]]

    def behind(self, cost: str, depth: int) -> float:
        """Return how many times the seconds of the best of the cuts this formula's cut takes."""
        return self.seconds[cost][depth] / min(seconds[depth] for seconds in self.seconds.values())

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.bandwidth / 1e9:g} GB/s"


@cache
def judged() -> list[Case]:
    """Cut and play all cases."""
    cases = []
    for (model, profile), workers, bandwidth in product(profiles().items(), WORKERS, BANDWIDTHS):
        cuts = {cost: partition(profile, [Level(workers, bandwidth)], cost=cost) for cost in FORMULAS}
        seconds = {
            cost: {
                depth: seconds_of_a_microbatch(stages_of(cut, profile, depth), bandwidth) for depth in DEPTHS
            }
            for cost, cut in cuts.items()
        }
        cases.append(Case(model, workers, bandwidth, cuts, seconds))
        print(cases[-1], file=sys.stderr, flush=True)
    return cases


def comparison() -> str:
    """How often a formula's cut is worse than the best of the three, and by up to how much.

    The first column says how many times as many microbatches are in flight as PipeDream keeps (NOAM on
    the first stage).  The judge has one compute queue and a full-duplex link for each worker, microbatches
    that go round robin, and a ring all-reduce after every r of them, which computation hides where it can.
    `links` assumes all this too, and the others do not: workers that wait for their gradients, or links on
    which both directions take turns, would judge differently.
    """
    cases, rows = judged(), []
    for depth, cost in product(DEPTHS, FORMULAS):
        behind = {case.behind(cost, depth): case for case in cases}
        count = sum(case.behind(cost, depth) > NOISE for case in cases)
        worst = max(behind)
        place = behind[worst] if count else "-"
        rows.append((depth, cost, f"{count} of {len(cases)}", f"{worst:.2f}", place))
    return table(("in flight", "cost", "worse than the best", "times its seconds, at most", "there"), rows)


def agreement() -> str:
    """The judge's seconds of a microbatch, divided by those that `links` promises for its own cut.

    The formula is what the busiest worker or link needs.  With as few microbatches in flight as PipeDream
    keeps, a pipeline whose messages take long does not reach it.
    """
    cases, rows = judged(), []
    for depth in DEPTHS:
        ratios = [case.seconds["links"][depth] / case.cuts["links"].bottleneck_seconds for case in cases]
        within = sum(ratio < 1.01 for ratio in ratios)
        rows.append((depth, f"{mean(ratios):.3f}", f"{max(ratios):.3f}", f"{within} of {len(cases)}"))
    return table(("in flight", "mean", "largest", "within 1%"), rows)


def every_case() -> str:
    """The replicas of the stages, and the microbatches a second with 1, 4 and 16 times as many in flight.

    VGG-16 is PipeDream's published profile.  AlexNet, ResNet-50 and GPT come from the arithmetic of their
    layers, and the others are random chains of 12 layers (`benchmarks/planner/chains.py`).
    """
    rows = [
        (case.model, case.workers, f"{case.bandwidth / 1e9:g}", *(_cell(case, cost) for cost in FORMULAS))
        for case in judged()
    ]
    return table(("model", "workers", "GB/s", *FORMULAS), rows)


def _cell(case: Case, cost: str) -> str:
    replicas = "-".join(map(str, case.cuts[cost].replicas))
    return f"{replicas}: " + ", ".join(f"{1 / seconds:.4g}" for seconds in case.seconds[cost].values())


def main(out: Out = RESULTS / "partition_costs.md") -> None:
    """Judge the cuts and write the tables."""
    parts = {"Comparison": comparison, "Agreement": agreement, "Every case": every_case}
    publish(out, "What the formulas of the partitioner are worth", "", *sections(parts))


if __name__ == "__main__":
    typer.run(main)
