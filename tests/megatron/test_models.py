"""Every kind of model trains as under stock's 1F1B: gradients, losses, and the losses that are logged."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.megatron import releases
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.placement import linear
from tests.support import rounding
from tests.support.comparison import (
    TWICE_USED,
    Result,
    assert_same_bits,
    assert_same_gradients,
    assert_same_predictions,
    run,
    stock,
)
from tests.support.tiers import first
from tests.support.training import since

PIPELINE = "--pipeline-model-parallel-size"
FLEX = "flex --pipeline-memory-limit 0.75"

LLAMA = (
    "--swiglu --normalization RMSNorm --qk-layernorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
AUX = f"{EXPERTS} --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type"

MODELS = {
    # Experts in every second layer, a shared one beside them, and both auxiliary losses.
    "experts": f"{AUX} aux_loss --moe-z-loss-coeff 0.001 --moe-shared-expert-intermediate-size 32 "
    "--moe-shared-expert-gate --moe-layer-freq ([0,1]*4)",
    "experts-global": f"{AUX} global_aux_loss --moe-token-dispatcher-type alltoall",
    "experts-sinkhorn": "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type sinkhorn",
}
"""What neither the table of ``features`` nor ``architectures`` has."""


def same_as_stock(world_size: int, flags: str, schedule: str) -> tuple[Result, Result]:
    """Train under ``schedule`` and under stock's, and compare what is logged, as far as it is printed."""
    base = f"{PIPELINE} {world_size} {flags}".split()
    ours = run(world_size, [*base, "--pipeline-schedule", *schedule.split()])
    theirs = stock(world_size, *base)
    assert len(ours.logged) == 2
    within = rounding.of_losses(updates=1) + rounding.PRINTED
    for our_step, their_step in zip(ours.logged, theirs.logged, strict=True):
        assert our_step.keys() == their_step.keys()
        for name, loss in our_step.items():
            assert float(loss) == pytest.approx(float(their_step[name]), rel=within), name
    return ours, theirs


@pytest.mark.parametrize(
    ("model", "schedule"),
    first(1, [("experts", "v-half"), ("experts-global", "v-zb"), ("experts-sinkhorn", "zb-h1")]),
)
def test_trains_as_stock(model: str, schedule: str) -> None:
    ours, theirs = same_as_stock(2, MODELS[model], schedule)
    assert_same_gradients(ours, theirs)
    if model == "experts":
        # What is compared is there, and the layers of both ends count once each.
        assert theirs.logged[0].keys() == {"lm loss", "load_balancing_loss", "z_loss"}


PREDICTION = "--mtp-num-layers 1 --position-embedding-type rope"


@pytest.mark.parametrize(
    ("world_size", "model", "schedule"),
    first(
        2,
        [
            (2, PREDICTION, "v-half"),
            (2, f"{PREDICTION} {UNTIED} --bf16", "v-half"),
            (2, f"{PREDICTION} {UNTIED}", "zb-h1"),
            (2, f"{PREDICTION} {UNTIED}", "interleaved"),
            (4, "--mtp-num-layers 2 --position-embedding-type rope --calculate-per-token-loss", "v-zb"),
            (4, f"{PREDICTION} {AUX} aux_loss", "zb-h1"),
        ],
    ),
)
def test_multi_token_prediction(world_size: int, model: str, schedule: str) -> None:
    ours, theirs = same_as_stock(world_size, model, schedule)
    assert_same_predictions(ours, theirs)
    if UNTIED in model:
        assert_same_bits(ours, theirs)


HYBRID = "--spec tests.support.hybrid_layers stack --position-embedding-type rope --hybrid-layer-pattern"
BUILDS_HYBRIDS = since((0, 19), "megatron-core before 0.19 leaves building a hybrid model to its scripts")
HYBRID_EXPERTS = f"{EXPERTS} --moe-aux-loss-coeff 0.01 {HYBRID} *E|E*|-E|E*/*-"


@BUILDS_HYBRIDS
@pytest.mark.parametrize(
    ("model", "schedule"), first(1, [(f"{HYBRID} *|-*|-*-|*-", "v-half"), (f"{HYBRID} *-*-*|-*-", FLEX)])
)
def test_hybrid_model(model: str, schedule: str) -> None:
    assert_same_gradients(*same_as_stock(2, model, schedule))


@BUILDS_HYBRIDS
def test_hybrid_model_with_experts_and_prediction() -> None:
    ours, theirs = same_as_stock(2, HYBRID_EXPERTS, "v-zb")
    assert {"load_balancing_loss", "mtp_1 loss"} < ours.logged[0].keys()
    for name, gradient in ours.gradients.items():
        assert name[0] in TWICE_USED or torch.equal(gradient, theirs.gradients[name]), name


def described_layers(file: Path) -> list[str]:
    """Write each layer of a model of four to ``file``; return the flags that Megatron wants beside it."""
    attention = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
    mlp = {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False}
    blocks = [{"attention": dict(attention), "ffn": dict(mlp)} for _ in range(4)]
    blocks[1]["attention"] = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
    blocks[2]["ffn"] = {"ffn_mult": None, "no_op": True, "replace_with_linear": False}
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 10000}
    others = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_scaling": {"factor": 8.0}}
    file.write_text(json.dumps({**sizes, **others, "block_configs": blocks}))
    return shlex.split(
        f"--heterogeneous-layers-config-path {file} --num-layers 4 --swiglu --normalization RMSNorm "
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope --disable-bias-linear "
        f"--use-rotary-position-embeddings --use-rope-scaling {UNTIED} --clip-grad 0"
    )


@since(releases.CORE_0_19, "before 0.19 a checkout's script builds such a model")
def test_layers_that_a_file_describes_one_by_one(tmp_path: Path) -> None:
    """With one chunk a rank, which ``flex`` takes by itself; Megatron builds them in no other way.

    It compiles them from measured stages alone.
    """
    costs = tmp_path / "costs.json"
    costs_file.write(Costs.unit(linear(2)), costs)
    flags = ["--pipeline-model-parallel-size", "2", *described_layers(tmp_path / "layers.json")]
    for schedule in ("zb-h1", f"flex --pipeline-memory-limit 1 --pipeline-costs {costs}"):
        assert_same_bits(run(2, [*flags, "--pipeline-schedule", *schedule.split()]), stock(2, *flags))
