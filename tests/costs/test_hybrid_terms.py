"""The terms of Mamba-2, latent and shared experts, activation functions and described layers, one by one."""

import json

import pytest

from megatron_pp_ext.costs import ends
from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.mamba import mamba
from megatron_pp_ext.costs.mlp import experts, mlp
from megatron_pp_ext.costs.model_parts import block
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.parts import Half, LayerBlock, blocks
from megatron_pp_ext.planner.step.model_description import describe, parameters
from tests.costs.test_layer_terms import GATED, HIDDEN, MODEL, B, H, S, costs, seconds

HEADS, WIDTH, GROUPS, STATE = 16, 32, 4, 64
INNER, STATES = HEADS * WIDTH, GROUPS * STATE
PROJECTED = 2 * INNER + 2 * STATES + HEADS
MAMBA = {
    "mamba_num_heads": HEADS, "mamba_head_dim": WIDTH, "mamba_num_groups": GROUPS, "mamba_state_dim": STATE,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 384, "add_bias_linear": False}


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_mamba_layer_s_products_and_scan(tensor):
    """arXiv 2405.21060, section 6, with chunks of 128: products with other tokens of a chunk for each group
    and head, twice those with a state; the convolution has four taps.  No product has a bias."""
    found = mamba(costs("product", **MAMBA, tensor_model_parallel_size=tensor))
    weights = H * (PROJECTED + INNER) / tensor
    assert found.weight_operations == 2 * S * B * weights
    chunks = 2 * S * B * (128 * (STATES + INNER) + 2 * INNER * STATE) / tensor
    assert found.activation_operations == chunks + 2 * S * B * 4 * (INNER + 2 * STATES) / tensor
    own = 5 * (INNER + 2 * STATES) + 3 * HEADS + INNER
    assert found.parameters == weights + own / tensor + 2 * H


def test_heads_of_a_mamba_layer_make_twice_the_hidden_size():
    assert mamba(costs("product", mamba_head_dim=32)) == mamba(
        costs("product", mamba_head_dim=32, mamba_num_heads=2 * H // 32)
    )


def test_a_mamba_layer_gathers_as_an_mlp_does():
    """Two all-reduces a pass without sequence parallelism, half of one a gather."""
    assert seconds(mamba(costs("gather", **MAMBA, tensor_model_parallel_size=4))) == (
        2 * HIDDEN, 2 * HIDDEN, 0,
    )  # fmt: skip


def test_context_parallel_ranks_give_tokens_for_heads():
    """What was projected before the scan, and its result behind."""
    found = mamba(costs("exchange", **MAMBA, context_parallel_size=4))
    moved = 2 * (S / 4) * B * (PROJECTED + INNER)
    assert seconds(found) == (moved, moved, 0)


def test_the_bytes_of_a_scan():
    """What comes in and goes out, a state of each chunk four times, scores of each group twice, in fp32."""
    found = mamba(costs("scan", **MAMBA))
    states, scores = 4 * INNER * STATE / 128, 4 * GROUPS * 128
    assert found.forward_seconds == S * B * (2 * (PROJECTED + INNER) + 4 * states + 2 * scores)
    assert found.input_gradient_seconds == 2 * found.forward_seconds


@pytest.mark.parametrize("tensor", [1, 2])
def test_latent_experts_get_and_return_latent_tokens(tensor):
    latent = {
        **EXPERTS,
        "moe_latent_size": 64,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": True,
    }
    plain = {**latent, "moe_latent_size": None}
    sent = 2 * 2 * S * B * 64 / tensor
    assert seconds(experts(costs("shuffle", **latent))) == (2 * sent, 2 * sent, 0)
    found, other = (experts(costs("product", **one)) for one in (latent, plain))
    assert found.expert_parameters == 8 * 2 * 64 * 384 / tensor
    assert found.parameters - other.parameters == 2 * H * 64
    # Each rank projects its own tokens, down and up.
    projections = 2 * 2 * (S / tensor) * B * H * 64
    assert found.weight_operations == projections + 2 * 2 * S * B * 2 * 64 * 384 / tensor


@pytest.mark.parametrize(("cut", "ranks"), [(True, 2), (False, 1)])
def test_sequence_parallelism_alone_divides_latent_tokens(cut, ranks):
    """Both projections and what they keep: every tensor-parallel rank has all tokens without it."""
    sizes = {**EXPERTS, "tensor_model_parallel_size": 2, "sequence_parallel": cut}
    latent, plain = (experts(costs("product", **sizes, moe_latent_size=size)) for size in (64, None))
    tokens = 2 * S * B
    routed = 2 * tokens * (H - 64)
    assert latent.after_forward - plain.after_forward == tokens * 64 / ranks - routed
    assert (
        latent.after_input_gradient - plain.after_input_gradient == 2 * tokens * (H + 64) / ranks - 2 * routed
    )


def test_the_gate_of_a_shared_expert():
    shared = {**EXPERTS, "moe_shared_expert_intermediate_size": 640}
    gated, plain = (experts(costs("copy", **shared, moe_shared_expert_gate=gate)) for gate in (True, False))
    assert gated.parameters - plain.parameters == H
    assert gated.after_forward - plain.after_forward == HIDDEN
    assert gated.forward_seconds - plain.forward_seconds == 3 * HIDDEN


def test_a_router_is_whole_on_each_tensor_parallel_rank():
    """It works on the rank's own tokens; its weight gradient is in I."""
    whole, half = (
        experts(costs("product", **EXPERTS, tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1))
        for ranks in (1, 2)
    )
    assert half.parameters == whole.parameters == 8 * H + 2 * H
    router = 2 * S * B * 8 * H
    assert whole.input_gradient_seconds - whole.weight_gradient_seconds == 2 * router
    assert half.input_gradient_seconds - half.weight_gradient_seconds == router


@pytest.mark.parametrize(
    ("changed", "forward", "backward", "kept"),
    [
        ({}, 3, 5, 2),
        ({"activation_func_clamp_value": 7.0}, 3, 5, 2),  # which the kernel does not look at
        ({"bias_swiglu_fusion": False}, 7, 11, 4),
        ({"bias_swiglu_fusion": False, "activation_func_clamp_value": 7.0}, 11, 22, 5),
    ],
)
def test_a_gate_in_one_kernel_and_in_several(changed, forward, backward, kept):
    """In activations of the inner width, that of the second product's input beside those that are kept."""
    width = 2 * S * B * 768
    found = mlp(costs("copy", **GATED, **changed, hidden_dropout=0.0))
    norm = costs("copy", **GATED).norm()
    assert seconds(found) == (5 * HIDDEN + forward * width, 5 * HIDDEN + backward * width, 0)
    assert found.after_forward - norm.after_forward == (kept + 1) * width


def test_a_depth_of_prediction_is_gathered():
    """The sum of the input's gradient and the gathered result; sequence parallelism gathers again in I, W."""
    found = ends.prediction(costs("gather", tensor_model_parallel_size=2))
    assert seconds(found) == (HIDDEN, 2 * 2 * HIDDEN, 0)
    found = ends.prediction(costs("gather", tensor_model_parallel_size=2, sequence_parallel=True))
    assert seconds(found) == (2 * HIDDEN + HIDDEN, 2 * 2 * HIDDEN + HIDDEN, 0)
    assert found.gathering == 2 * HIDDEN


def test_described_layers():
    """Halves are left out, replaced by a product, or have a size of their own."""
    made = costs("product", **GATED)
    whole, none, linear = Half(), Half(is_left_out=True), Half(is_linear=True)
    assert block(made, LayerBlock(whole, whole)) == self_attention(made) + mlp(made)
    assert block(made, LayerBlock(none, none)) == Part()
    assert block(made, LayerBlock(none, Half(size=512))) == mlp(made.of(ffn_hidden_size=512))
    assert block(made, LayerBlock(Half(size=2), none)).parameters == H * (2 * H + 2 * 2 * H // 8) + H
    assert block(made, LayerBlock(none, linear)).parameters == H * H + H


def described(**attention):
    return json.dumps({"block_configs": [{"attention": attention, "mlp": {"ffn_mult": 2.625}}]})


def test_the_words_of_a_described_layer():
    """The width is two thirds of a multiple of the hidden size, in multiples of 256."""
    (found,) = blocks(None, described(n_heads_in_group=4), 32, 4096)
    assert found == LayerBlock(Half(size=8), Half(size=7168))
    (found,) = blocks(None, described(num_query_groups=2), 32, 4096)
    assert found.attention == Half(size=2)
    (found,) = blocks(None, described(n_heads_in_group=None, no_op=True), 32, 4096)
    assert found.attention == Half(is_left_out=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "^--heterogeneous-layers-config-encoded-json: not JSON"),
        ("[]", "has no list of block_configs: give the config.json"),
        (described(no_op=True), "a layer has no num_query_groups and no n_heads_in_group: give"),
    ],
)
def test_what_describes_no_layers_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        blocks(None, text, 32, 4096)
    with pytest.raises(ValueError, match=r"^/nowhere\.json: cannot be read \(No such file"):
        blocks("/nowhere.json", None, 32, 4096)


@pytest.mark.parametrize(
    "ranks",
    [{"tensor_model_parallel_size": 4, "sequence_parallel": True}, {"expert_model_parallel_size": 8}, {}],
)
def test_a_model_s_parameters_are_those_of_all_ranks_together(ranks):
    """Of 8 experts a token uses 2; it takes one row of the embedding, and of positions."""
    found = parameters(describe({**MODEL, **EXPERTS, "num_layers": 1, "moe_latent_size": 64, **ranks}))
    layer = 4 * H * H + 2 * H + 2 * H + 8 * H + 2 * H * 64
    expert, rows = 2 * 64 * 384, 1024
    assert found.parameters == layer + 8 * expert + 2 * H + rows * H + S * H
    assert found.active_parameters == layer + 2 * expert + 2 * H + rows * H
