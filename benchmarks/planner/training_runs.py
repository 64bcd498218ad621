"""How far are estimated steps and memory from published training runs?

python -m benchmarks.planner.training_runs          # 3 minutes of a core
python -m benchmarks.planner.training_runs --fit    # fits the factors of the devices first: 3 minutes more

Writes results/training_runs.md and results/training_runs.png.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated

import typer

from benchmarks.planner import a100, held_out
from benchmarks.planner.judged import (
    Judged,
    all_judged,
    by_kind,
    error,
    grouped,
    machine_of,
    timed,
)
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.planner.step import error_band
from megatron_pp_ext.planner.step.error_band import headroom
from megatron_pp_ext.planner.step.model_description import describe
from reference.training_runs import PublishedRun

_SWEEP = 4
"""The fewest jobs of one model, batch and number of GPUs whose order is judged."""


def middle(rows: Sequence[Judged]) -> tuple[float, float]:
    """Return between which measured seconds for each estimated one eight in ten of ``rows`` are."""
    ratios = [1 / result.ratio for result in rows]
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
    return tenths[0], tenths[-1]


def baseline(every: Sequence[Judged]) -> dict[str, float]:
    """Return the error of each kind if a GPU did as many operations a second in every job of the kind.

    It is the one constant of each device and kind that fits best: the median over its jobs.
    """
    errors = {}
    for kind, rows in by_kind(every).items():
        devices = grouped(rows, lambda result: result.run.gpu).values()
        best = {group[0].run.gpu: median(map(_rate, group)) for group in devices}
        errors[kind] = mean(abs(_rate(result) / best[result.run.gpu] - 1) for result in rows)
    return errors


def _rate(result: Judged) -> float:
    """Return the operations a second of a GPU, in units of the peak; recomputed ones count."""
    estimate = result.estimate
    assert result.run.seconds is not None
    again = 4 / 3 if result.run.model.get("recompute_granularity") == "full" else 1.0
    return again * estimate.utilisation * estimate.step_seconds / result.run.seconds


def rank_correlation(every: Iterable[Judged]) -> tuple[float, int]:
    """Return Spearman's correlation within sweeps, weighted by their jobs, and how many jobs are in sweeps.

    A sweep is the jobs of one source with the same model, sequences, GPUs and batch.
    """
    sweeps = defaultdict(list)
    for result in every:
        model = result.run.model
        same = ("num_layers", "hidden_size", "seq_length", "global_batch_size", "fp8")
        sweeps[(result.run.source, result.run.gpus, *(model.get(name) for name in same))].append(result)
    large = [rows for rows in sweeps.values() if len(rows) >= _SWEEP]
    jobs = sum(map(len, large))
    return sum(len(rows) * _spearman(rows) for rows in large) / jobs, jobs


def _spearman(rows: Sequence[Judged]) -> float:
    measured = _ranks([result.run.seconds or 0.0 for result in rows])
    predicted = _ranks([result.estimate.step_seconds for result in rows])
    middle = (len(rows) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(measured, predicted, strict=True))
    apart = [sum((a - middle) ** 2 for a in ranks) for ranks in (measured, predicted)]
    return float(covariance / (apart[0] * apart[1]) ** 0.5) if all(apart) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in order; equal ones share theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def verdicts(every: Iterable[Judged]) -> list[tuple[Judged, bool]]:
    """Return the runs whose fitting is known, and whether the planner is right about it.

    A run that has a time did fit.
    """
    return [
        (result, (result.bytes <= _offered(result.run)) is not result.run.ran_out)
        for result in every
        if result.run.is_judged_by_memory and (result.run.ran_out or result.run.seconds)
    ]


def _offered(run: PublishedRun) -> float:
    """Return the bytes of a GPU that a search would use for ``run``."""
    return (1 - headroom(describe(dict(run.model)))) * machine_of(run).memory_bytes


def kinds() -> str:
    """Mean absolute errors of a step's seconds, with eight in ten of the steps; `one constant` is a baseline.

    A run is held out where the factors of its device were fitted without its publisher.  The baseline is one
    rate of operations for each device and kind, the median of its jobs.
    """
    every, held = timed(all_judged()), by_kind(held_out.held_out())
    plain = baseline(every)
    fitted = by_kind(every)
    rows: list[Row] = [
        (
            kind,
            len(group),
            f"{error(group):.1%}",
            f"{mean(result.ratio for result in group) - 1:+.1%}",
            "{:.2f} to {:.2f}".format(*middle(group)),
            f"{error(fitted[kind]):.1%}",
            f"{plain[kind]:.1%}",
        )
        for kind, group in held.items()
    ]
    means = (mean(map(error, kinds.values())) for kinds in (held, fitted))
    means_shown = [f"{value:.1%}" for value in (*means, mean(plain.values()))]
    rows.append(("mean of the kinds", len(every), means_shown[0], "", "", *means_shown[1:]))
    rows.append(
        ("all rows", len(every), f"{error(held_out.held_out()):.1%}", "", "", f"{error(every):.1%}", "")
    )
    correlation, jobs = rank_correlation(every)
    head = (
        "kind",
        "runs",
        "error, held out",
        "mean, held out",
        "measured over estimated, 8 in 10 held out",
        "error as shipped",
        "one constant: error",
    )
    return f"{table(head, rows)}\n\nRank correlation within sweeps: {correlation:.2f} ({jobs} jobs)."


def sources() -> str:
    """The errors by source, each judged with the factors of runs that were held out."""
    rows: list[Row] = [
        (
            kind,
            source,
            len(by_source),
            f"{error(by_source):.1%}",
            f"{mean(result.ratio for result in by_source) - 1:+.1%}",
        )
        for kind, group in by_kind(held_out.held_out()).items()
        for source, by_source in grouped(group, lambda result: result.run.source).items()
    ]
    return table(("kind", "source", "runs", "error", "mean"), rows)


def memory() -> str:
    """Whether jobs fit, with the headroom that a search keeps, and the bytes of the fullest rank."""
    all_verdicts = verdicts(all_judged())
    wrong = [result for result, is_right in all_verdicts if not is_right]
    measured = [result for result in all_judged() if result.run.memory]
    rows = [
        (
            source,
            len(by_source),
            f"{mean(result.bytes / 1e9 / (result.run.memory or 1) for result in by_source) - 1:+.1%}",
        )
        for source, by_source in grouped(measured, lambda result: result.run.source).items()
    ]
    text = f"Right about {len(all_verdicts) - len(wrong)} of {len(all_verdicts)} runs."
    if wrong:
        text += (
            " Wrong: "
            + "; ".join(f"{result.run.name}, {result.bytes / 1e9:.1f} GB" for result in wrong)
            + "."
        )
    return f"{text}\n\n{table(('source', 'runs with printed memory', 'estimated over printed, mean'), rows)}"


def each() -> str:
    """Every run but those of the small models, of which there are many."""
    rows = [
        (result.run.source, result.run.name, f"{result.run.seconds:.3f}", *_estimated(result))
        for result in timed(all_judged())
        if result.kind != error_band.SMALL
    ]
    return table(("source", "job", "measured s", "estimated s", "error"), rows)


def _estimated(result: Judged) -> tuple[str, str]:
    return f"{result.estimate.step_seconds:.3f}", f"{result.ratio - 1:+.1%}"


def draw(path: Path) -> None:
    """Draw estimated against measured seconds, a colour for each kind and a mark for each device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    for kind, group in by_kind(timed(all_judged())).items():
        for gpu, by_gpu in grouped(group, lambda result: result.run.gpu).items():
            mark = {"h100": "o", "a100-80g": "^", "b200": "s"}[gpu]
            axes.scatter(
                [result.run.seconds for result in by_gpu],
                [result.estimate.step_seconds for result in by_gpu],
                s=14,
                marker=mark,
                color=f"C{error_band.KINDS.index(kind)}",
                alpha=0.6,
                label=f"{kind}, {gpu}: {len(by_gpu)} runs",
            )
    ends = (0.05, 200)
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.plot(
        ends, [1.2 * end for end in ends], ends, [end / 1.2 for end in ends], color="grey", ls=":", lw=0.8
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured step, seconds", ylabel="estimated step, seconds; dotted: 20% off")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


PARTS = {
    "Errors by kind": kinds,
    "Errors by source": sources,
    "Factors of a device": held_out.folds,
    **a100.PARTS,
    "Memory": memory,
    "Every run": each,
}


def main(
    out: Out = RESULTS / "training_runs.md",
    fit: Annotated[bool, typer.Option("--fit", help="Fit the factors of the devices first.")] = False,
) -> None:
    """Write the tables and the picture."""
    if fit:
        held_out.keep()
    about = (
        "The runs, with their sources, are in reference/training_runs.json.  The files of the systems say "
        "which of their figures are fitted to these runs."
    )
    publish(out, "Estimates against published training runs", about, *sections(PARTS))
    if str(out) != "-":
        draw(out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
