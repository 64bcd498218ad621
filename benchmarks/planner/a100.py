"""What published runs across nodes of A100 say: which jobs to trust, and why."""

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
"""What the runs' frameworks and machines did unlike Megatron of today on the shipped system."""


@cache
def across_nodes() -> tuple[Judged, ...]:
    """Return the runs of dense models across nodes of A100."""
    return tuple(one for one in timed(all_judged()) if one.kind == error_band.A100)


def causes() -> str:
    """Mean errors with the shipped constants if one fact after the other about the runs is counted.

    Where each fact is from stands beside the runs.
    """
    rows: list[Row] = []
    known: set[str] = set()
    for name, fact in {"today's Megatron on the shipped system": "", **_CAUSES}.items():
        known.add(fact)
        found = [judged(_with_facts(one.run, known)) for one in across_nodes()]
        by_source = grouped(found, _source).values()
        cells = (f"{error(ones):.1%}" for ones in (*by_source, found))
        rows.append((f"and {name}" if fact else name, *cells))
    return table(("counted", *grouped(across_nodes(), _source), "both"), rows)


def _with_facts(run: PublishedRun, known: set[str]) -> PublishedRun:
    framework = {name: value for name, value in run.framework.items() if name in known}
    return replace(run, framework=framework, node=run.node if "node" in known else None)


def by_size() -> str:
    """Estimated over measured seconds less one, and measured seconds, of one model, batch and 512 GPUs.

    With 8 tensor-parallel ranks, which fill a node, estimates follow the published times.  With fewer, times
    of neighbours in this table differ by up to half, now for one microbatch and now for another: what slowed
    them is none of their sizes.
    """
    ones = [one for one in across_nodes() if _source(one) == "vtrain-multi" and one.run.gpus == 512]
    sizes = sorted({_size(one, "micro_batch") for one in ones})
    rows: list[Row] = []
    by_layout = grouped(ones, lambda one: (_size(one, "tensor_model_parallel"), _pipeline(one)))
    for layout, found in sorted(by_layout.items()):
        cells = {_size(one, "micro_batch"): f"{one.ratio - 1:+.0%}, {one.run.seconds:.1f}" for one in found}
        rows.append((*layout, *(cells.get(size, "") for size in sizes)))
    return table(("TP", "PP", *(f"microbatch {size}" for size in sizes)), rows)


def _source(one: Judged) -> str:
    return one.run.source


def _size(one: Judged, name: str) -> int:
    return int(one.run.model[f"{name}_size"])


def _pipeline(one: Judged) -> int:
    return _size(one, "pipeline_model_parallel")


PARTS = {
    "A100: what explains the errors": causes,
    "A100: which jobs to trust": by_size,
}
