"""What the schedules take on three named jobs, in seconds and bytes.

python -m benchmarks.planner.named_jobs        # seconds; writes results/named_jobs.md
"""

from collections.abc import Mapping, Sequence

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.comparison import Alternative, compared
from megatron_pp_ext.planner.step.estimate import estimate_request

MACHINE = system.read("h100")

_8B, _70B = ("llama3-8b", 8, 32, 4096), ("llama3-70b", 64, 128, 8192)
_PARALLEL = "--tensor-model-parallel-size {} --pipeline-model-parallel-size {}"
_OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
_FLAGS = "--micro-batch-size 1 --sequence-parallel --use-distributed-optimizer"

JOBS = {
    "8B, 8 GPUs, TP 2 PP 4": (_8B, f"{_FLAGS} {_PARALLEL.format(2, 4)}"),
    "70B, 64 GPUs, TP 8 PP 4": (_70B, f"{_FLAGS} {_OVERLAPPED} {_PARALLEL.format(8, 4)}"),
    "70B, 64 GPUs, TP 4 PP 8": (_70B, f"{_FLAGS} {_OVERLAPPED} {_PARALLEL.format(4, 8)}"),
}
"""The model of each job, its GPUs, sequences a step and tokens a sequence; and the flags that README and
examples/llama3_70b_64gpus.sh give besides."""

_OURS: Mapping[str | None, Sequence[str]] = {
    None: ("zb-h1", "v-zb", "v-half", "v-min"),
    "auto": ("1f1b", "zb-h1", "v-zb", "v-half", "v-min"),
}
"""The schedules by the value of --pipeline-vocabulary."""


def _steps(name: str) -> dict[str, Alternative]:
    """Return the step of each schedule of the job ``name``, with its bytes on the fullest rank."""
    (model, gpus, sequences, tokens), flags = JOBS[name]
    asked = described.read(
        flags.split(), model, {"global_batch_size": sequences, "seq_length": tokens}
    ).counted()
    steps: dict[str, Alternative] = {}
    for vocabulary, schedules in _OURS.items():
        for schedule in schedules:
            one = asked.with_arguments(pipeline_schedule=schedule, pipeline_vocabulary=vocabulary)
            request = for_world(one, gpus)
            beside = compared(one, MACHINE, request.data, estimate_request(one, MACHINE, request))
            assert beside and beside.stock and beside.interleaved
            for stock in (beside.stock, beside.interleaved):
                steps.setdefault(stock.name, stock)
            key = f"{schedule}, vocabulary {vocabulary}" if vocabulary else schedule
            steps[key] = beside.chosen
    return steps


def rows(name: str) -> Sequence[Row]:
    """Return a row for each schedule of the job ``name``: seconds of a step, bytes of the fullest rank."""
    steps = _steps(name)
    stock = steps["stock 1F1B"]
    return [
        (
            key,
            f"{step.step_seconds:.4g}",
            f"{step.fullest_bytes / 1e9:.1f}",
            f"{step.step_seconds / stock.step_seconds - 1:+.1%}",
            "" if step.fullest_bytes <= MACHINE.memory_bytes else "does not fit",
        )
        for key, step in steps.items()
    ]


def main(out: Out = RESULTS / "named_jobs.md") -> None:
    """Write the table of each job."""
    head = ("schedule", "step, s", "fullest rank, GB", "step against stock 1F1B", "")
    about = (
        "Everything is estimated for H100, as by `mpp estimate`; nothing of it was measured. A device has "
        f"{MACHINE.memory_bytes / 1e9:.1f} GB, and measured peaks were up to 3% above their estimates."
    )
    parts = [part for name in JOBS for part in (f"## {name}", table(head, rows(name)))]
    publish(out, "Three named jobs", about, *parts)


if __name__ == "__main__":
    typer.run(main)
