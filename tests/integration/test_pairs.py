"""Forwards and backwards in pairs, by Megatron's plans of its layers, against stock.

Stock has them under its own interleaved schedule, in half precision and with experts on several ranks.  A
plan cuts the graph of a layer where its tokens leave for other ranks, which changes no sum: losses and
gradients are stock's to the last bit.
"""

import pytest

from tests.support.comparison import assert_same_bits, run, stock

PAIRS = "--overlap-moe-expert-parallel-comm"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --bf16 --accumulate-allreduce-grads-in-fp32 --clip-grad 0"
)
TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 2"
SHARED = "--moe-shared-expert-intermediate-size 32"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MODELS = {
    "experts": (4, f"{TWO} {EXPERTS}"),
    "pp4": (8, f"{FOUR} {EXPERTS} --global-batch-size 16 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2": (
        8,
        f"{TWO} {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "shared": (
        4,
        f"{TWO} {EXPERTS} {SHARED} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "drop": (4, f"{TWO} {EXPERTS} --moe-expert-capacity-factor 1.0 --moe-z-loss-coeff 0.001"),
    "drop-padded": (
        4,
        f"{TWO} {EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "dense-beside": (4, f"{TWO} {EXPERTS} --moe-layer-freq [0]*2+[1]*6"),
    "untied": (4, f"{TWO} {EXPERTS} --untie-embeddings-and-output-weights"),
    "recompute": (4, f"{TWO} {EXPERTS} --recompute-granularity selective --recompute-modules core_attn"),
    "optimizer": (4, f"{TWO} {EXPERTS} {OVERLAP}"),
    "per-token": (4, f"{TWO} {EXPERTS} --calculate-per-token-loss"),
}


def in_pairs(model: str, schedule: str, *more: str):
    """Return what trains in pairs, and stock's interleaved schedule without any overlap."""
    world_size, flags = MODELS[model]
    plain = flags if "virtual" in flags else f"{flags} {CHUNKS}"
    words = [*flags.replace("--num-layers-per-virtual-pipeline-stage 1", "").split(), *more]
    ours = run(world_size, [*words, PAIRS, "--pipeline-schedule", schedule])
    return ours, stock(world_size, *plain.split(), *more)


@pytest.mark.parametrize("schedule", ["dualpipe-v", "interleaved"])
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_stock(model: str, schedule: str) -> None:
    assert_same_bits(*in_pairs(model, schedule))


def test_stock_in_pairs_is_stock_without() -> None:
    """What is compared above is what Megatron's own combined schedule computes."""
    world_size, flags = MODELS["experts"]
    assert_same_bits(
        stock(world_size, *flags.split(), *CHUNKS.split(), PAIRS), in_pairs("experts", "interleaved")[1]
    )
