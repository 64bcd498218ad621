"""Each kind of attention: weights and bytes against a layer that Megatron builds, operations by hand."""

from functools import cache

import pytest

from megatron_pp_ext import cpu
from megatron_pp_ext.costs.attention import Attentions
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.parts import Attention
from megatron_pp_ext.job.typed_job import Job
from tests.costs.test_layer_terms import Only
from tests.support import attention_layers
from tests.support.tiers import first

SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 16 --global-batch-size 16 --train-iters 1 "
    "--lr 0.01 --tokenizer-type NullTokenizer --vocab-size 64 --disable-bias-linear --mock-data "
    "--normalization RMSNorm --position-embedding-type rope --swiglu"
)
GROUPED = "--group-query-attention --num-query-groups 2 --kv-channels 64"
LATENT = (
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 48"
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
    GROUPED,
    f"{GROUPED} --qk-layernorm",
    f"{GROUPED} --qk-layernorm --normalization LayerNorm",
    f"{GROUPED} --qk-l2-norm",
    f"{GROUPED} --attention-output-gate",
    f"{GROUPED} --attention-output-gate --qk-layernorm --bf16",
    f"{GROUPED} --softmax-type learnable",
    f"{GROUPED} --window-size 15,0",
    f"{GROUPED} {AGAIN} core_attn",
    f"{GROUPED} --attention-output-gate --qk-layernorm {AGAIN} core_attn",
    LATENT.replace("--q-lora-rank 96", ""),
    LATENT,
    NORMED,
    f"{NORMED} --rope-type yarn --rotary-scaling-factor 4 --mscale 1.0 --mscale-all-dim 1.0",
    f"{NORMED} --mla-down-proj-fusion",
    f"{NORMED} {AGAIN} mla_up_proj",
    f"{NORMED} --bf16 {AGAIN} mla_up_proj core_attn",
    f"{NORMED} {AGAIN} layernorm core_attn",
    SPARSE,
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01 --bf16 --dsa-indexer-use-sparse-loss",
    f"{SPARSE} --bf16 {AGAIN} mla_up_proj",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01 {AGAIN} core_attn",
    DELTA,
    f"{DELTA} --bf16",
    f"{DELTA} --linear-num-value-heads 2 --linear-value-head-dim 128",
    f"{DELTA} --bf16 {AGAIN} gdn_norm_out layernorm",
]


NARROW = (
    f"{GROUPED} --attention-output-gate --qk-layernorm --bf16",
    f"{GROUPED} --softmax-type learnable",
    f"{NORMED} --bf16 {AGAIN} mla_up_proj core_attn",
    f"{SPARSE} --dsa-indexer-loss-coeff 0.01",
    f"{DELTA} --bf16",
)
"""The kinds that `make test` builds."""

EACH = first(len(NARROW), [*NARROW, *(kind for kind in KINDS if kind not in NARROW)])


def words(kind: str) -> list[str]:
    return cpu.with_cpu_flags([*SIZES.split(), *kind.split()])


@cache
def _built(is_narrow: bool) -> dict[str, attention_layers.Layer]:
    kinds = [kind for kind in KINDS if (kind in NARROW) == is_narrow]
    return dict(zip(kinds, attention_layers.build(*map(words, kinds)), strict=True))


def built(kind: str) -> attention_layers.Layer:
    """The first layer of a model of a ``kind``; one rank builds several one after the other."""
    return _built(kind in NARROW)[kind]


def attentions(kind: str) -> Attentions:
    return Attentions(LayerCosts(Job.of(flag_table.parse(words(kind), {})[0])))


def attention(kind: str) -> Part:
    return attentions(kind).layer(1)


@pytest.mark.parametrize("kind", EACH)
def test_weights_are_those_that_megatron_builds(kind: str) -> None:
    assert attention(kind).parameters == built(kind).parameters


@pytest.mark.parametrize("kind", EACH)
def test_bytes_are_those_that_autograd_keeps(kind: str) -> None:
    assert attention(kind).after_forward == pytest.approx(built(kind).kept, rel=0.03)


@pytest.mark.parametrize("kind", EACH)
def test_what_waits_for_weight_gradients(kind: str) -> None:
    """Compressed keys' expansion is absorbed in sparse attention, and an indexer without a loss has none."""
    assert attention(kind).after_input_gradient == built(kind).waiting


TOKENS, HIDDEN, LENGTH = 16 * 64, 256, 64


@pytest.mark.parametrize(
    ("flags", "keys"),
    # Half of 64 see 1 to 15 tokens more than none; the sum over all is 15 x 16 / 2 + 49 x 16.
    [("", 64 * 65 / 2), ("--window-size 63,0", 64 * 65 / 2), ("--window-size 15,0", 120 + 49 * 16)],
)
def test_a_window_leaves_the_pairs_that_it_shows(flags: str, keys: float) -> None:
    """Scores and values: two operations for each number of a pair, and as many where the mask hides."""
    found = attention(f"{GROUPED} {flags}").activation_operations
    assert found == pytest.approx(2 * 16 * keys * 2 * 2 * 256, rel=0.04)


def test_the_operations_of_latent_attention() -> None:
    """arXiv 2405.04434, section 2.1, formulas 9 to 17: two operations for each token and weight."""
    products = 256 * 96 + 256 * (64 + 32) + 96 * 4 * 96 + 64 * 4 * (64 + 48) + 4 * 48 * 256
    found = attention(NORMED)
    assert found.weight_operations == 2 * TOKENS * products
    assert found.activation_operations == 2 * TOKENS * LENGTH * 4 * (96 + 48)


def test_the_operations_of_sparse_attention() -> None:
    """The absorbed products and attention to 16 keys are of activations; the indexer has no loss."""
    products = 256 * 96 + 256 * (64 + 32) + 96 * 4 * 96 + 4 * 48 * 256
    found = attention(SPARSE)
    absorbed = 2 * TOKENS * 64 * 4 * (64 + 48)
    chosen = 2 * TOKENS * 16 * (2 - 16 / 64) * 4 * (96 + 64)
    assert found.weight_operations == 2 * TOKENS * products
    assert found.activation_operations == absorbed + chosen


def test_the_operations_of_an_indexer_that_learns() -> None:
    with_loss, without = attention(f"{SPARSE} --dsa-indexer-loss-coeff 0.01"), attention(SPARSE)
    projections = 96 * 2 * 64 + 256 * 64 + 256 * 2
    assert with_loss.weight_operations - without.weight_operations == 2 * TOKENS * projections
    assert with_loss.activation_operations - without.activation_operations == 2 * TOKENS * LENGTH * 2 * 64


def test_the_operations_of_a_gated_delta_net() -> None:
    """For each token of a head: five products in its chunk, three with the state; and the convolution."""
    found = attention(DELTA)
    assert found.weight_operations == 2 * TOKENS * 256 * (2 * 128 + 3 * 256 + 2 * 4)
    rule = 4 * (64 * (3 * 64 + 2 * 64) + 3 * 64 * 64)
    assert found.activation_operations == 2 * TOKENS * (rule + 4 * (2 * 128 + 256))


ENGINE = "--transformer-impl transformer_engine --bf16 --attention-backend auto"
SPREAD = f"{ENGINE} --tensor-model-parallel-size 2 --sequence-parallel"


def test_ranks_have_the_weights_that_compress_whole_and_share_others() -> None:
    """Under --mla-down-proj-fusion they share those too; norms are whole either way."""
    compressing, norms = 256 * 96 + 256 * (64 + 32), 256 + 96 + 64
    shared = 96 * 4 * 96 + 64 * 4 * (64 + 48) + 4 * 48 * 256
    assert attention(f"{NORMED} {SPREAD}").parameters == compressing + shared / 2 + norms
    joined = attention(f"{NORMED} --mla-down-proj-fusion {SPREAD}")
    assert joined.parameters == (compressing + shared) / 2 + norms
    indexer = 96 * 2 * 64 + 256 * 64 + 256 * 2 + 2 * 64
    assert attention(f"{SPARSE} {SPREAD}").parameters == compressing + indexer + shared / 2 + norms


def test_queries_that_are_not_compressed_have_a_norm_of_the_hidden_state() -> None:
    """Transformer Engine's, before the product that makes them; what it reads is not what others read."""
    plain = f"{LATENT.replace('--q-lora-rank 96', '')} {ENGINE}"
    normed, without = attention(f"{plain} --qk-layernorm"), attention(plain)
    assert normed.parameters - without.parameters == 256 + 64
    assert normed.after_forward - without.after_forward == 2 * TOKENS * (256 + 64)
    assert normed.after_input_gradient - without.after_input_gradient == 2 * TOKENS * 256


def test_expanded_keys_and_the_norms_before_are_made_again() -> None:
    """Queries and keys of 96 in four heads, values of 48, and both norms' results."""
    kept = attention(f"{NORMED} {ENGINE}").after_forward
    again = attention(f"{NORMED} {ENGINE} {AGAIN} mla_up_proj")
    assert kept - again.after_forward == 2 * TOKENS * (4 * (96 + 96 + 48) + 96 + 64)


@pytest.mark.parametrize(
    ("kind", "ring", "exchanged"),
    [
        (GROUPED, 2 * 2 * 64, 0),
        # Keys of 96 and values of 48 in four heads.
        (NORMED, 4 * (96 + 48), 0),
        # Queries, keys, values, gates and two numbers a head there, and the results back.
        (DELTA, 0, 2 * 128 + 2 * 256 + 2 * 4 + 256),
    ],
)
def test_what_context_parallel_ranks_send(kind: str, ring: int, exchanged: int) -> None:
    """Keys and values go around, and in I their gradients too; a delta net's tokens go there and back."""
    sizes = f"{kind} --context-parallel-size 4"
    numbers = 4 * TOKENS / 4
    for sent, width, again in (("ring", ring, 2), ("exchange", exchanged, 1)):
        found = Attentions(LayerCosts(Job.of(flag_table.parse(words(sizes), {})[0]), Only(sent))).layer(1)
        assert (found.forward_seconds, found.input_gradient_seconds) == (
            numbers * width,
            again * numbers * width,
        )


@pytest.mark.parametrize("has_lora", [True, False])
def test_latent_attention_keeps_a_part_of_what_it_gathers(has_lora: bool) -> None:
    """The hidden state that makes queries is the one that is compressed; a part of it gathered is a copy."""
    kind = LATENT if has_lora else LATENT.replace("--q-lora-rank 96", "")
    queries = (96 / 2 + 96 / 2 if has_lora else 256 / 2) + 4 * 96 / 2
    compressed, expanded = 256 / 2 + 96 / 2, 64 / 2 + 4 * (64 + 48) / 2
    results = 4 * 48 / 2 + 256 / 2
    found = attention(f"{kind} {SPREAD}").after_input_gradient
    assert found == 2 * TOKENS * (compressed + queries + expanded + results)


@pytest.mark.parametrize(
    "kind",
    [
        f"{GROUPED} --attention-output-gate --qk-layernorm --softmax-type learnable",
        NORMED,
        f"{SPARSE} --dsa-kernel-backend cudnn --dsa-indexer-loss-coeff 0.01",
        DELTA,
    ],
)
def test_kernels_keep_nothing_of_pairs(kind: str) -> None:
    """As many tokens in half as many sequences of twice the length take the same bytes."""
    longer = "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 8"
    found = [attention(f"{kind} {ENGINE} {more}").after_forward for more in ("", longer)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "letters", "same"),
    [
        (f"{GROUPED} --window-size 15,0", "****", [1, 1, 1, 1]),
        (f"{GROUPED} --window-size 15,0 --window-attn-skip-freq 2", "****", [1, 2, 1, 2]),
        (f"{GROUPED} --window-size 15,0 --window-attn-skip-freq [0,1,1,0]", "****", [1, 2, 2, 1]),
        (LATENT, "++++", [1, 1, 1, 1]),
        (DELTA, "G*G*", [1, 2, 1, 2]),
        (f"{DELTA} --linear-attention-freq [1,1,0,1]", "GG*G", [1, 1, 2, 1]),
        (SPARSE, "DDDD", [1, 1, 1, 1]),
        (f"{SPARSE} --dsa-indexer-topk-freq 2 --dsa-indexer-skip-topk-offset 2", "DDDD", [1, 1, 2, 1]),
    ],
)
def test_equal_layers_are_one_object(kind: str, letters: str, same: list[int]) -> None:
    made = attentions(kind)
    layers = [made.layer(number) for number in range(1, 5)]
    own = Job.of(flag_table.parse(words(kind), {})[0]).attention
    assert "".join(map(own.letter, range(1, 5))) == letters
    numbers = {id(layer): number for number, layer in zip(same, layers, strict=True)}
    assert [numbers[id(layer)] for layer in layers] == same
    assert len(set(numbers.values())) == len(numbers)


def test_layers_that_differ_are_those_of_megatron() -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
    from megatron.core.transformer.utils import is_layer_window_attention

    for frequency in (1, 2, 3):
        for offset in (0, 1, 4):
            own = Attention(
                window_size="3,0",
                window_attn_skip_freq=frequency,
                dsa_indexer_topk_freq=frequency,
                dsa_indexer_skip_topk_offset=offset,
            )
            for number in range(1, 13):
                is_windowed = is_layer_window_attention((3, 0), frequency, number)
                assert own.window(number, 8) == (4 if is_windowed else 8)
                assert own.chooses(number) == (not is_dsa_skip_topk_layer(number, offset, frequency))
