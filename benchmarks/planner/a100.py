"""What published runs across nodes of A100 say: which jobs to trust, why, and how constants are chosen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import product

from benchmarks.planner.judged import Judged, all_judged, error, grouped, judged, timed
from benchmarks.report import Row, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.planner.step import error_band
from reference.training_runs import PublishedRun

_RATES, _NETWORKS = (0.78, 0.81, 0.84, 0.87, 0.9), (0.15, 0.25, 0.35, 0.5)
"""The shares that are tried: of the best rate of products in bf16, and of the network's rate."""

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


def halves() -> str:
    """The two constants that matter across nodes, fitted on a part of the runs, and the error on the others.

    The shipped ones also have to leave every figure of arXiv 2205.05198, table 5, and of arXiv 2401.10241,
    table 9, within 15%, which needs a share of 0.84 for products.
    """
    parts: dict[str, Callable[[Judged], bool]] = {
        "one half, by a hash of the job": lambda one: _is_even(one.run.name),
        "the other half": lambda one: not _is_even(one.run.name),
        "bloom-prequel": lambda one: _source(one) == "bloom-prequel",
        "vtrain-multi": lambda one: _source(one) == "vtrain-multi",
    }
    rows: list[Row] = []
    for name, is_fitted in parts.items():
        errors = {
            point: [error([one for one in found if is_fitted(one) is wanted]) for wanted in (True, False)]
            for point, found in _grid().items()
        }
        (rate, network), (fitted, others) = min(errors.items(), key=lambda item: item[1][0])
        rows.append((name, rate, network, f"{fitted:.1%}", f"{others:.1%}"))
    return table(("fitted on", "products", "network", "error there", "error on the others"), rows)


@cache
def _grid() -> Mapping[tuple[float, float], Sequence[Judged]]:
    """Return the runs judged with each pair of shares."""
    machine = system.read("a100-80g")
    return {
        (rate, network): [
            judged(
                one.run,
                replace(machine, sustained={**machine.sustained, "bf16": rate, "network": network}),
            )
            for one in across_nodes()
        ]
        for rate, network in product(_RATES, _NETWORKS)
    }


def _is_even(name: str) -> bool:
    return sha256(name.encode()).digest()[0] % 2 == 0


def _source(one: Judged) -> str:
    return one.run.source


def _size(one: Judged, name: str) -> int:
    return int(one.run.model[f"{name}_size"])


def _pipeline(one: Judged) -> int:
    return _size(one, "pipeline_model_parallel")


PARTS = {
    "A100: what explains the errors": causes,
    "A100: which jobs to trust": by_size,
    "A100: constants fitted on a part of the runs": halves,
}
