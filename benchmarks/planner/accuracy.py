"""How far can the planner's models be trusted, and how fast is its search?

python -m benchmarks.planner.accuracy        # 10 minutes of two cores; writes results/planner.md
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measuring import MPP, use_of
from benchmarks.planner.published import best_of_grid, llama_step, megatron_step, ranked
from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from reference.published_runs import GRID, GRID_ASSUMPTIONS, GRID_SCHEDULES, LLAMA, MEGATRON

GPT3 = {
    "num_layers": 96,
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "bf16": True,
}


def activations() -> str:
    """Tiny GPTs on the CPU; the recorder counts what autograd and deferred weight gradients keep."""
    import tests.support.ranks  # noqa: F401  (installs the stand-ins for torch.cuda before Megatron is imported)

    # isort: split
    from megatron_pp_ext.launch import install
    from tests.megatron import test_planner_memory as runs

    install()
    rows: list[Row] = []
    for name, (count, flags) in runs.CONFIGURATIONS.items():
        measured, predicted = runs.measured(count, flags), runs.predicted(count, flags)
        errors = (
            prediction / measurement - 1 for prediction, measurement in zip(predicted, measured, strict=True)
        )
        peaks = [" ".join(f"{value / 1024:,.0f}" for value in values) for values in (measured, predicted)]
        rows.append((name, *peaks, f"{max(errors, key=abs):+.1%}"))
    return table(("configuration", "measured", "predicted", "largest error"), rows)


def megatron_steps() -> str:
    """Seconds of a step on A100 80G with tensor parallelism 8."""
    rows: list[Row] = []
    savings = []
    for run in MEGATRON:
        row: list[object] = [run.name]
        steps = [megatron_step(run, selective).step_seconds for selective in (False, True)]
        savings.append(abs(steps[0] / steps[1] / (run.full / run.selective) - 1))
        for selective, seconds in ((False, run.full), (True, run.selective)):
            estimate = megatron_step(run, selective)
            error = estimate.step_seconds / seconds - 1
            row += [
                seconds,
                f"{estimate.step_seconds:.2f}",
                f"{error:+.1%}",
                f"{estimate.fullest.total / 1e9:.0f}",
            ]
        rows.append(row)
    columns = ("published s", "predicted s", "error", "predicted GB")
    head = ("model", *(f"{recompute}: {column}" for recompute in ("full", "selective") for column in columns))
    about = f"The saving of selective recomputation is predicted within {max(savings):.1%}."
    return f"{about}\n\n{table(head, rows)}"


def grid() -> str:
    """MFU in percent of the best configuration of each schedule, by a grid search.

    Predicted ones rest on the operations that Megatron counts today (``num_floating_point_operations``), half
    of causal attention.  Its count of 2024 had all of attention: on that, they would be 0.8% higher for
    sequences of 1,024, and 2.4% for those of 3,072.
    """
    parts = [
        f"Assumed: {GRID_ASSUMPTIONS}.",
    ]
    for length, published in GRID.items():
        best = {name: best_of_grid(length, family) for name, family in GRID_SCHEDULES.items()}
        predicted = {name: 100 * result.estimate.utilisation for name, result in best.items()}
        rows = [
            (name, published[name], f"{predicted[name]:.2f}", result.candidate.name, f"{size / 1e9:.1f}")
            for name, result in best.items()
            for size in (result.estimate.fullest.total,)
        ]
        winners = {
            batch: ranked(
                {
                    name: best_of_grid(length, family, batch).estimate.utilisation
                    for name, family in GRID_SCHEDULES.items()
                }
            )[-1]
            for batch in (80, 320)
        }
        winners_of_batches = ", ".join(
            f"{winner} with batches of {batch}" for batch, winner in winners.items()
        )
        parts += [
            f"Sequences of {length:,}:",
            table(("schedule", "published", "predicted", "predicted configuration", "GB"), rows),
            f"{_orders(published, predicted)} The predicted winner is {winners_of_batches}.",
        ]
    return "\n\n".join(parts)


def llama() -> str:
    """Tokens a second and gigabytes of a GPU.

    Sequences of 4,096 in microbatches of 1, 64 of them, are assumed; the published memory is of less
    activation a microbatch than that, so that only the orders can be compared.
    """
    steps = {name: llama_step(schedule) for name, (schedule, _, _) in LLAMA.items()}
    rates = {name: step.tokens_per_second / 8 for name, step in steps.items()}
    memory = {name: step.fullest.total / 1e9 for name, step in steps.items()}
    rows = [
        (name, rate, f"{rates[name]:.0f}", size, f"{memory[name]:.1f}")
        for name, (_, rate, size) in LLAMA.items()
    ]
    parts = [
        table(("schedule", "published tokens/s a GPU", "predicted", "published GB", "predicted"), rows),
        "Throughput: " + _orders({name: rate for name, (_, rate, _) in LLAMA.items()}, rates),
        "Memory: " + _orders({name: size for name, (_, _, size) in LLAMA.items()}, memory),
    ]
    return "\n\n".join(parts)


def speed() -> str:
    """A search of everything for 175B on 1,024 GPUs, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model, numbers = Path(folder, "model.json"), Path(folder, "found.json")
        model.write_text(json.dumps(GPT3), encoding="utf-8")
        words = [
            "search",
            "--gpus",
            "1024",
            "--global-batch-size",
            "1536",
            "--seq-length",
            "2048",
            "--system",
            "a100-80g",
        ]
        files = ["--model", str(model), "--json", str(numbers)]
        use = use_of([*MPP, *words, *files], {"MEGATRON_PP_EXT_CACHE": folder})
        summary = json.loads(numbers.read_text(encoding="utf-8"))
    rows = [
        (
            configuration["name"],
            f"{configuration['estimate']['step_seconds']:.3f}",
            f"{configuration['estimate']['utilisation']:.1%}",
        )
        for configuration in summary["best"]
    ]
    about = (
        f"1,024 A100, batches of 1,536 sequences of 2,048: {summary['legal']:,} configurations, of which "
        f"{summary['unfit']:,} cannot fit and {summary['replayed']:,} were replayed, took "
        f"{use.processor_seconds:.0f} s of one core (user and system) and {use.peak_mib / 1024:.2f} GiB, "
        "compiling flex for two sizes included."
    )
    return f"{about}\n\n{table(('configuration', 'step s', 'MFU'), rows)}"


def _orders(published: dict[str, float], predicted: dict[str, float]) -> str:
    order, goal = ranked(predicted), ranked(published)
    lead = predicted[order[-1]] / predicted[order[-2]] - 1
    if order == goal:
        return f"The order is the published one: {' < '.join(goal)}."
    winner = "right" if order[-1] == goal[-1] else "**wrong**"
    return (
        f"Published: {' < '.join(goal)}; predicted: {' < '.join(order)}. The winner is {winner}, "
        f"by {lead:.1%} of the second."
    )


PARTS = {
    "A search of everything": speed,
    "Peaks of activations, in KiB rank by rank": activations,
    "Steps of arXiv 2205.05198, table 5": megatron_steps,
    "Which schedule wins for 98.5B (arXiv 2405.15362)": grid,
    "Llama2-7B on 8 MI300X": llama,
}
"""The search comes first, while this process is small: what it forks counts as large as it is itself."""


def main(
    out: Out = RESULTS / "planner.md",
    only: Annotated[str, typer.Option(help="Only sections with this in their title.")] = "",
) -> None:
    """Write the tables."""
    parts = {title: part for title, part in PARTS.items() if only in title}
    about = "Two constants of the A100 are fitted to several sources, arXiv 2205.05198 among them."
    publish(out, "What the planner predicts, and what was measured", about, *sections(parts))


if __name__ == "__main__":
    typer.run(main)
