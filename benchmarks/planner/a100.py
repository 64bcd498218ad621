"""Published runs across nodes of A100: which jobs to trust, and why."""

from dataclasses import replace
from functools import cache

from benchmarks.planner.judged import Judged, all_judged, error, grouped, judged, timed
from benchmarks.report import Row, table
from megatron_pp_ext.planner.step import error_band
from reference.training_runs import PublishedRun

_CAUSES = {
    "messages divided among tensor-parallel ranks": "scatter_gather_tensors_in_pipeline",
    "4 of 12 NVLinks in the nodes of BLOOM": "node",
    "tensor-parallel sums that nothing hides, for BLOOM": "async_tensor_model_parallel_allreduce",
    "gradients that products do not add, for BLOOM": "gradient_accumulation_fusion",
}
"""Differences of the runs' frameworks and machines from Megatron of today on the shipped system."""


@cache
def across_nodes() -> tuple[Judged, ...]:
    """Return the runs of dense models across nodes of A100."""
    return tuple(result for result in timed(all_judged()) if result.kind == error_band.A100)


def causes() -> str:
    """Mean errors with the shipped constants if one fact after the other about the runs is counted.

    Where each fact is from stands beside the runs.
    """
    rows: list[Row] = []
    facts: set[str] = set()
    for name, fact in {"today's Megatron on the shipped system": "", **_CAUSES}.items():
        facts.add(fact)
        results = [judged(_with_facts(result.run, facts)) for result in across_nodes()]
        by_source = grouped(results, _source).values()
        cells = (f"{error(group):.1%}" for group in (*by_source, results))
        rows.append((f"and {name}" if fact else name, *cells))
    return table(("counted", *grouped(across_nodes(), _source), "both"), rows)


def _with_facts(run: PublishedRun, facts: set[str]) -> PublishedRun:
    framework = {name: value for name, value in run.framework.items() if name in facts}
    return replace(run, framework=framework, node=run.node if "node" in facts else None)


def by_size() -> str:
    """Estimated over measured seconds less one, and measured seconds, of one model, batch and 512 GPUs.

    With 8 tensor-parallel ranks, which fill a node, estimates follow the published times.  With fewer, times
    of neighbours in this table differ by up to half, now for one microbatch and now for another: what slowed
    them is none of their sizes.
    """
    results = [
        result for result in across_nodes() if _source(result) == "vtrain-multi" and result.run.gpus == 512
    ]
    sizes = sorted({_size(result, "micro_batch") for result in results})
    rows: list[Row] = []
    by_layout = grouped(results, lambda result: (_size(result, "tensor_model_parallel"), _pipeline(result)))
    for layout, group in sorted(by_layout.items()):
        cells = {
            _size(result, "micro_batch"): f"{result.ratio - 1:+.0%}, {result.run.seconds:.1f}"
            for result in group
        }
        rows.append((*layout, *(cells.get(size, "") for size in sizes)))
    return table(("TP", "PP", *(f"microbatch {size}" for size in sizes)), rows)


def _source(result: Judged) -> str:
    return result.run.source


def _size(result: Judged, name: str) -> int:
    return int(result.run.model[f"{name}_size"])


def _pipeline(result: Judged) -> int:
    return _size(result, "pipeline_model_parallel")


PARTS = {
    "A100: what explains the errors": causes,
    "A100: which jobs to trust": by_size,
}
