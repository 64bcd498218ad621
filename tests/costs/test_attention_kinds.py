"""Each kind of attention: weights and bytes against a layer that Megatron builds, operations by hand."""

from functools import cache

import pytest

from megatron_pp_ext import cpu
from megatron_pp_ext.costs.attention_kinds import Attentions
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.typed_job import Job
from tests.support import attention_layers

SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 16 --global-batch-size 16 --train-iters 1 "
    "--lr 0.01 --tokenizer-type NullTokenizer --vocab-size 64 --disable-bias-linear --mock-data "
    "--normalization RMSNorm --position-embedding-type rope --swiglu"
)
GROUPED = "--group-query-attention --num-query-groups 2 --kv-channels 64"
LATENT = (
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)
NORMED = f"{LATENT} --qk-layernorm"
SPARSE = (
    f"{NORMED} --experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 "
    "--dsa-indexer-topk 16"
)
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 64 "
    "--linear-value-head-dim 64 --linear-num-key-heads 2 --linear-num-value-heads 4"
)
AGAIN = "--recompute-granularity selective --recompute-modules"
KINDS = [
    "",
    "--qk-layernorm",
    "--attention-output-gate",
    GROUPED,
    f"{GROUPED} --bf16",
    f"{GROUPED} --qk-layernorm",
    f"{GROUPED} --qk-layernorm --normalization LayerNorm",
    f"{GROUPED} --qk-l2-norm",
    f"{GROUPED} --attention-output-gate",
    f"{GROUPED} --attention-output-gate --qk-layernorm --bf16",
    f"{GROUPED} --softmax-type learnable",
    f"{GROUPED} --softmax-type off-by-one",
    f"{GROUPED} --window-size 15,0",
    f"{GROUPED} --attention-output-gate --qk-layernorm {AGAIN} core_attn",
    LATENT.replace("--q-lora-rank 96", ""),
    LATENT,
    NORMED,
    f"{NORMED} --bf16",
    f"{NORMED} --rope-type yarn --rotary-scaling-factor 4 --mscale 1.0 --mscale-all-dim 1.0",
    f"{NORMED} --mla-down-proj-fusion",
    f"{NORMED} {AGAIN} mla_up_proj",
    f"{NORMED} --bf16 {AGAIN} mla_up_proj core_attn",
    f"{NORMED} {AGAIN} layernorm core_attn",
    SPARSE,
    f"{SPARSE} --bf16",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01 --bf16 --dsa-indexer-use-sparse-loss",
    f"{SPARSE} {AGAIN} mla_up_proj",
    f"{SPARSE} --bf16 {AGAIN} mla_up_proj",
    f"{SPARSE} --bf16 {AGAIN} core_attn",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01 {AGAIN} core_attn",
    DELTA,
    f"{DELTA} --bf16",
    f"{DELTA} --linear-num-value-heads 2 --linear-value-head-dim 128",
    f"{DELTA} {AGAIN} gdn_norm_out",
    f"{DELTA} --bf16 {AGAIN} gdn_norm_out layernorm",
]


def words(kind: str) -> list[str]:
    return cpu.with_cpu_flags([*SIZES.split(), *kind.split()])


@cache
def built() -> dict[str, attention_layers.Layer]:
    """The first layer of each kind, which one rank builds one after the other."""
    return dict(zip(KINDS, attention_layers.build(*map(words, KINDS)), strict=True))


def attentions(kind: str) -> Attentions:
    return Attentions(LayerCosts(Job.of(flag_table.parse(words(kind), {}))))


def attention(kind: str) -> Part:
    return attentions(kind).layer(1)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_megatron_builds(kind: str) -> None:
    assert attention(kind).parameters == built()[kind].parameters


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_autograd_keeps(kind: str) -> None:
    assert attention(kind).after_forward == pytest.approx(built()[kind].kept, rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_for_weight_gradients(kind: str) -> None:
    """Compressed keys' expansion is absorbed in sparse attention, and an indexer without a loss has none."""
    assert attention(kind).after_input_gradient == built()[kind].waiting
