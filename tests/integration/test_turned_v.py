"""A V whose ends are both on the last rank trains as stock 1F1B does, bit for bit, and as the V on the first."""

import pytest
import torch
from megatron.core import mpu

from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import first, wide
from tests.support.training import global_parameters, train

PIPELINE = "--pipeline-model-parallel-size"
TURNED = ("--pipeline-loss-rank", "last")
UNTIED = "--untie-embeddings-and-output-weights"
PER_TOKEN = "--calculate-per-token-loss"

LAYOUTS = {
    "pp2-tied": (2, (PIPELINE, "2")),
    "pp3-odd-microbatches": (3, (PIPELINE, "3", "--num-layers", "6", "--global-batch-size", "7")),
    "pp4-untied": (4, (PIPELINE, "4", UNTIED)),
    "pp4-tied": (4, (PIPELINE, "4")),
    "tp2-pp2-per-token": (4, (PIPELINE, "2", "--tensor-model-parallel-size", "2", PER_TOKEN)),
    "pp2-dp2-untied": (4, (PIPELINE, "2", UNTIED)),
}
FAMILIES = ("v-half", "v-min", "v-zb", "dualpipe-v", "1f1b-v")
ALWAYS = {("v-half", "pp2-tied"), ("v-zb", "pp3-odd-microbatches"), ("dualpipe-v", "pp4-untied")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        case if case in ALWAYS else wide(case)
        for case in ((name, layout) for name in FAMILIES for layout in LAYOUTS)
    ],
)
def test_same_bits_as_stock(name: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    ours = run(world_size, [*flags, "--pipeline-schedule", name, *TURNED])
    assert_same_bits(ours, stock(world_size, *flags))
