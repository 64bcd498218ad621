"""How far are the parts of the cost model from kernels and collectives measured alone?

python -m benchmarks.planner.components KERNELS --before benchmarks/planner/components_before.json

KERNELS is a folder with tables of ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a51, in
aic-core/src/aiconfigurator_core/systems/data), packed by gzip and named by their content and their device,
as in gemm_h100.csv.gz.  The tables themselves are no part of this project; figures fitted to them are, in
megatron_pp_ext/costs/systems.  They are fitted to one half of the shapes, and compared with the other half.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import typer

from benchmarks.planner.kernels_alone import PARTS, SYSTEMS
from benchmarks.report import RESULTS, Out, Row, publish, table

_GOALS = {"products": 0.08, "attention": 0.1}
_OTHERS = 0.15


@dataclass(frozen=True, slots=True)
class Found:
    """Planner over measured: the median, the 16th and 84th of 100, and the median distance from it."""

    shapes: int
    median: float
    low: float
    high: float
    deviation: float

    @property
    def spread(self) -> float:
        """Half of the range of the middle 68 of 100, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def compared(folder: Path) -> dict[tuple[str, str], Found]:
    """Return the results for each component and device of ``folder``."""
    ratios = defaultdict(list)
    for part in PARTS:
        for device in SYSTEMS:
            for name, of, ratio in part(folder, device):
                ratios[name, of].append(ratio)
    return {key: _found(values) for key, values in ratios.items() if len(values) > 1}


def _found(ratios: Sequence[float]) -> Found:
    parts, middle = quantiles(ratios, n=50, method="inclusive"), median(ratios)
    return Found(
        len(ratios), middle, parts[7], parts[41], median(abs(ratio / middle - 1) for ratio in ratios)
    )


def draw(path: Path, results: Mapping[tuple[str, str], Found]) -> None:
    """Draw the median and the spread of every component."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.22 * len(results) + 1), layout="constrained")
    axes = figure.add_subplot()
    for place, (_key, result) in enumerate(reversed(list(results.items()))):
        axes.plot((result.low, result.high), (place, place), color="C0", linewidth=4, alpha=0.4)
        axes.plot(result.median, place, "o", color="C0", markersize=4)
    axes.axvline(1, color="grey", linewidth=0.8)
    names = [f"{component}, {device}" for component, device in reversed(list(results))]
    axes.set(xscale="log", xlabel="planner over measured: the median, and 68 in 100 of the shapes")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    ticks = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    figure.savefig(path, dpi=120)


def main(
    kernels: Annotated[Path, typer.Argument(help="The folder of the tables.")],
    out: Out = RESULTS / "components.md",
    before: Annotated[Path | None, typer.Option(help="Medians and spreads to compare with.")] = None,
) -> None:
    """Write the table and the picture."""
    results = compared(kernels)
    old = json.loads(before.read_text(encoding="utf-8")) if before else {}
    rows: list[Row] = []
    for (component, device), result in results.items():
        was = old.get(f"{component}, {device}")
        goal = next((goal for name, goal in _GOALS.items() if name in component), _OTHERS)
        cells = (f"{was[0]:.2f}", f"{was[1]:.1%}") if was else ("", "")
        is_met = "met" if result.spread <= goal else "missed"
        cells_now = (
            f"{result.median:.2f}",
            f"{result.spread:.1%}",
            f"{result.low:.2f} to {result.high:.2f}",
            f"{result.deviation:.1%}",
        )
        rows.append((component, device, result.shapes, *cells, *cells_now, f"{goal:.0%}: {is_met}"))
    head = (
        "component",
        "device",
        "shapes",
        "median before",
        "spread before",
        "median",
        "spread",
        "68 in 100",
        "median deviation",
        "goal",
    )
    about = (
        "The planner's seconds of a component that runs alone, over those measured, for the shapes that took "
        "no part in fitting (half of them by a hash; of collectives, the sizes between the rows).  The "
        "spread is half of the range of the middle 68 of 100, over the median.  Rows of experts with 1,024 "
        "or more tokens each that reach less than half of the rate of another row of the same width and type "
        "ran kernels that were not tuned, and are left out.  The tables are of ai-dynamo/aiconfigurator "
        "(Apache-2.0, commit 095f58a51)."
    )
    publish(
        out,
        "Parts of the cost model against measured kernels",
        about,
        table(head, rows),
        "![](components.png)",
    )
    if str(out) != "-":
        draw(out.with_suffix(".png"), results)


if __name__ == "__main__":
    typer.run(main)
