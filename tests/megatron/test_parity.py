"""Every family trains as stock 1F1B does: equal losses and equal gradients, bit for bit in fp32."""

from itertools import product

import pytest
import torch
from megatron.core import mpu

from megatron_pp_ext.schedule import catalog
from tests.support.comparison import MAIN_FAMILIES, assert_same_bits, run, stock
from tests.support.tiers import first, wide
from tests.support.training import global_parameters, has_flag, train

PIPELINE = "--pipeline-model-parallel-size"
TP2 = ("--tensor-model-parallel-size", "2")
UNTIED = "--untie-embeddings-and-output-weights"
PER_TOKEN = "--calculate-per-token-loss"
OTHER_FAMILIES = tuple(name for name in catalog.NAMES if name not in MAIN_FAMILIES)

LAYOUTS = {
    "pp2-tied": (2, (PIPELINE, "2")),
    "pp4-untied": (4, (PIPELINE, "4", UNTIED)),
    "pp3-odd-microbatches": (3, (PIPELINE, "3", "--num-layers", "6", "--global-batch-size", "7")),
    "tp2-pp2-per-token": (4, (PIPELINE, "2", *TP2, PER_TOKEN)),
    "pp2-dp2-untied": (4, (PIPELINE, "2", UNTIED)),
}

ALWAYS = {
    "gpipe": "pp2-tied",
    "zb-h2": "pp3-odd-microbatches",
    "v-min": "pp2-tied",
    "v-zb": "pp3-odd-microbatches",
}
"""The layout that is not wide; the other families train in several layouts in ``test_pairwise``."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [case if ALWAYS.get(case[0]) == case[1] else wide(case) for case in product(MAIN_FAMILIES, LAYOUTS)],
)
def test_same_bits_as_stock(name: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    ours = run(world_size, [*flags, "--pipeline-schedule", name])
    assert_same_bits(ours, stock(world_size, *flags))


@pytest.mark.parametrize("name", first(1, OTHER_FAMILIES[::-1]))
def test_other_families(name: str) -> None:
    """The order alone is new here: what orders are made of is proved above."""
    stages = 4 * catalog.entry(name).chunks
    more_layers = ("--num-layers", str(stages)) if stages > 8 else ()
    flags = (PIPELINE, "4", UNTIED, *more_layers)
    assert_same_bits(run(4, [*flags, "--pipeline-schedule", name]), stock(4, *flags))


@pytest.mark.parametrize("name", first(1, ["v-half", "zb-h1"]))
def test_evaluation(name: str) -> None:
    """Evaluation in the middle of training, with another number of microbatches than training has.

    Without clipping, whose sums go by rank, even the losses after a step are equal to the last bit.
    """
    flags = (PIPELINE, "2", "--eval-interval", "1", "--eval-iters", "2", "--clip-grad", "0")
    flags += ("--train-iters", "2")
    if has_flag("--eval-global-batch-size"):
        flags += ("--eval-global-batch-size", "3")
    ours = run(2, [*flags, "--pipeline-schedule", name])
    theirs = stock(2, *flags)
    assert ours.validation == theirs.validation
    assert len(ours.validation) >= 3
    assert_same_bits(ours, theirs)


def _require_tied(chunks: list[torch.nn.Module]) -> None:
    """Stock's own initial weights: the output layer must start as the embedding, on whatever rank it is."""
    ends = [p for name, p in global_parameters(chunks) if name == "embedding.word_embeddings.weight"]
    if mpu.get_pipeline_model_parallel_rank() != 0:
        assert not ends
        return
    embedding, output = ends
    assert embedding.any()
    assert torch.equal(embedding, output)


def test_tied_weights_start_equal() -> None:
    train(2, [PIPELINE, "2", "--pipeline-schedule", "v-half", "--train-iters", "1"], initialize=_require_tied)
