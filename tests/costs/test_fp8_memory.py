"""What waits for W under FP8, a byte a number, as ``DeferringStore`` keeps it, and what weights take."""

import pytest

from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.ends import output, prediction
from megatron_pp_ext.costs.mlp import experts, mlp
from megatron_pp_ext.costs.optimizers import Sharing, model_state
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.planner.step.model_description import describe

TOKENS, HIDDEN, INNER, VOCABULARY = 2048, 1024, 4096, 51200
OPERANDS = TOKENS * (HIDDEN + 3 * HIDDEN) + TOKENS * (HIDDEN + HIDDEN) + 2 * TOKENS * (HIDDEN + INNER)
"""Numbers: input and output gradient of the two products of attention and of the two of the MLP."""


def arguments(**changed):
    model = {
        "num_layers": 16, "hidden_size": HIDDEN, "num_attention_heads": 16, "seq_length": TOKENS,
        "vocab_size": VOCABULARY, "bf16": True, "micro_batch_size": 1, "global_batch_size": 1,
    }  # fmt: skip
    return describe({**model, **changed})


def costs(**changed):
    return LayerCosts(arguments(**changed))


def waiting(costs):
    return (self_attention(costs) + mlp(costs)).after_input_gradient


def test_quantized_operands_wait_in_a_byte_a_number():
    assert waiting(costs()) == 2 * OPERANDS
    assert waiting(costs(fp8="hybrid")) == OPERANDS


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({}, 4), ({"tp_comm_overlap": True}, 4), ({"fp8_recipe": "tensorwise", "seq_length": 1924}, 4),
        ({"fp8_recipe": "blockwise"}, 4), ({"fp8_recipe": "blockwise", "seq_length": 1920}, 1),
        ({"fp8_recipe": "mxfp8", "seq_length": 1920}, 4), ({"fp8_recipe": "mxfp8", "seq_length": 1924}, 1),
    ],
)  # fmt: skip
def test_operands_that_are_gathered_wait_in_a_byte_a_number(changed, parts):
    """The inputs of both column-parallel products and the gradients of both row-parallel ones.

    A rank keeps its own part, unless its tokens share scales with those of others: 480 are no multiple of the
    128 of a block, nor 481 of the 32 of MXFP8.
    """
    split = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "fp8": "hybrid"}
    cut = HIDDEN + 3 * HIDDEN + 2 * INNER
    tokens = changed.get("seq_length", TOKENS)
    assert waiting(costs(**split, **changed)) == tokens * (4 * HIDDEN / parts + cut / 4)


def test_layers_that_do_not_quantize_keep_what_they_kept():
    assert waiting(costs(fp8="hybrid", transformer_impl="local")) == 2 * OPERANDS


def test_the_output_layer_does_not_quantize():
    plain, fp8 = (output(each, VOCABULARY).after_input_gradient for each in (costs(), costs(fp8="hybrid")))
    assert fp8 == pytest.approx(plain) == pytest.approx(2 * TOKENS * (HIDDEN + VOCABULARY))


def test_joining_a_prediction_s_inputs_quantizes():
    assert prediction(costs(fp8="hybrid")).after_input_gradient == 3 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("changed", "each"),
    [
        ({}, 2),
        ({"fp8": "hybrid"}, 4),
        ({"fp8": "hybrid", "fp8_param_gather": True}, 2),
        ({"fp8": "hybrid", "transformer_impl": "local"}, 2),
    ],
)
def test_weights_have_two_copies_in_fp8(changed, each):
    """The weights of products have them, in experts too; the output layer and the rest have none."""
    sizes = {"num_experts": 8, "moe_ffn_hidden_size": INNER, "moe_router_topk": 2}
    for made, products in (
        (mlp(costs(add_bias_linear=False, **changed)), 2 * HIDDEN * INNER),
        (experts(costs(add_bias_linear=False, **sizes, **changed)), 8 * 2 * HIDDEN * INNER),
        (output(costs(**changed), VOCABULARY), 0),
    ):
        others = made.parameters + made.expert_parameters - products
        found = model_state(arguments(**changed), made, Sharing(dense=1, expert=1)).weights
        assert found == pytest.approx(each * products + 2 * others)


def test_experts_keep_their_input_quantized_and_the_router_s_as_it_is():
    """Each token goes to two experts, which keep their input, the function's two halves and its result."""
    sizes = {"num_experts": 8, "moe_ffn_hidden_size": INNER, "moe_router_topk": 2, "swiglu": True}
    routed, norm, scores = 2 * TOKENS, 2 * TOKENS * HIDDEN, 3 * 4 * TOKENS * 8
    for flags, operand in (({}, 2), ({"fp8": "hybrid"}, 1)):
        inside = operand * HIDDEN + 2 * 2 * INNER + operand * INNER
        found = experts(costs(add_bias_linear=False, hidden_dropout=0.0, **sizes, **flags))
        assert found.after_forward == 2 * norm + scores + routed * inside


def test_a_shared_expert_quantizes_the_norm_s_output_besides_what_the_router_reads():
    sizes = {"num_experts": 8, "moe_ffn_hidden_size": INNER, "add_bias_linear": False, "fp8": "hybrid"}
    alone, shared = (
        experts(costs(**sizes, moe_shared_expert_intermediate_size=width)) for width in (None, INNER)
    )
    own = TOKENS * (2 * INNER + INNER)
    assert shared.after_forward - alone.after_forward == TOKENS * HIDDEN + own
