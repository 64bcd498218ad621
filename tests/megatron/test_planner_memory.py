"""The planner's peaks of activation bytes against those that the recorder measures in a training run.

Without dropout, whose masks torch keeps as wide as activations on a CPU and as bytes on a GPU.
"""

from dataclasses import replace

import pytest

from megatron_pp_ext import cpu
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.planner.step.workload import Workload
from tests.support.comparison import traced
from tests.support.flags import read_by_commands
from tests.support.tiers import first
from tests.support.training import TINY

LARGER = (
    "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --vocab-size 512 "
    "--global-batch-size 16 --train-iters 2"
)
PIPELINE = "--pipeline-model-parallel-size"
TENSOR = "--tensor-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method"

CONFIGURATIONS = {
    "1f1b, gated MLP, grouped queries": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule 1f1b --swiglu --group-query-attention --num-query-groups 2",
    ),
    "1f1b, p=4, untied": (4, f"{PIPELINE} 4 --pipeline-schedule 1f1b --untie-embeddings-and-output-weights"),
    "interleaved": (2, f"{PIPELINE} 2 --pipeline-schedule interleaved"),
    "zb-h1, p=4": (4, f"{PIPELINE} 4 --pipeline-schedule zb-h1"),
    "v-half, p=4, tied": (4, f"{PIPELINE} 4 --pipeline-schedule v-half"),
    "v-min, bf16": (2, f"{PIPELINE} 2 --pipeline-schedule v-min --bf16"),
    "v-zb, TP": (4, f"{PIPELINE} 2 --pipeline-schedule v-zb {TENSOR}"),
    "v-half, TP and SP": (4, f"{PIPELINE} 2 --pipeline-schedule v-half {TENSOR} --sequence-parallel"),
    "1f1b, TP and SP": (4, f"{PIPELINE} 2 --pipeline-schedule 1f1b {TENSOR} --sequence-parallel"),
    "1f1b, full recompute": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule 1f1b --hidden-size 128 {FULL} uniform --recompute-num-layers 1",
    ),
    "v-half, block recompute": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule v-half {FULL} block --recompute-num-layers 1",
    ),
    "interleaved, selective recompute": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule interleaved --recompute-granularity selective",
    ),
}


def measured(ranks: int, flags: str) -> list[int]:
    """The recorded peak of every pipeline rank, in bytes."""
    return [record.peak_bytes for record in traced(ranks, f"{LARGER} {flags}".split()).records]


def predicted(ranks: int, flags: str) -> tuple[float, ...]:
    """The planner's, but for what a whole backward computes again and drops: that is not recorded."""
    asked = read_by_commands(cpu.with_cpu_flags([*TINY, *LARGER.split(), *flags.split()]))
    request = for_world(asked, ranks)
    work = Workload(asked, system.read("h100"), request.placement, request.data)
    order = program(request.schedule, request.ranks, request.microbatches, request.placement.chunks)
    return order.in_flight.peaks([replace(part, workspace_in_whole=0.0) for part in work.parts])


TESTED = ("v-half, TP and SP", "1f1b, full recompute", "interleaved", "v-min, bf16")
"""benchmarks/planner/accuracy.py tells all twelve."""


@pytest.mark.parametrize("name", first(2, TESTED))
def test_peaks_are_within_five_percent(name: str) -> None:
    ranks, flags = CONFIGURATIONS[name]
    assert list(predicted(ranks, flags)) == pytest.approx(measured(ranks, flags), rel=0.05)
