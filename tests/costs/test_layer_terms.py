"""Each term of a layer's costs by itself: products, collectives, copies, biases, against closed forms.

A test charges one kind of kernel alone, so that a term which is missing or counted twice shows as a number.
"""

from dataclasses import dataclass

import pytest

from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.ends import (
    gathered,
    loss_workspace,
    of_output,
    output,
    positions,
    prediction,
    table,
)
from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.mlp import experts, mlp
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.schedule.actions import Kind

S, B, H, A, V = 512, 3, 256, 8, 1024
MODEL = {
    "num_layers": 2, "hidden_size": H, "num_attention_heads": A, "seq_length": S, "micro_batch_size": B,
    "vocab_size": V, "max_position_embeddings": S, "bf16": True, "hidden_dropout": 0.0,
}  # fmt: skip
HIDDEN = 2 * S * B * H
"""The bytes of one activation of the hidden size in bf16."""
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
GATED = {"swiglu": True, "ffn_hidden_size": 768, "add_bias_linear": False, "normalization": "RMSNorm"}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 384}


@dataclass
class Only(KernelSeconds):
    """Charges one kind of kernel: a second for each byte, or operation."""

    kind: str

    def product(self, m, n, k, adds=False, is_output=False, groups=1):
        return {"product": 2 * groups * m * n * k, "adding": adds}.get(self.kind, 0)

    def attention(self, work):
        if self.kind == "attention":
            return work.operations, 2 * work.operations
        return (work.scores, work.scores) if self.kind == "scores" else (0, 0)

    def copy(self, size):
        return size if self.kind == "copy" else 0

    def stream(self, size):
        return self.copy(size)

    def cast(self, numbers, ranks=1, is_normed=False):
        return numbers / ranks if self.kind == "cast" else 0

    def gather(self, size):
        return size if self.kind == "gather" else 0

    def shuffle(self, size):
        return size if self.kind == "shuffle" else 0

    def exchange(self, size):
        return size if self.kind == "exchange" else 0

    def delta_rule(self, operations):
        return 0, 0

    def scan(self, operations, size):
        return (size, 2 * size) if self.kind == "scan" else (0, 0)

    def ring(self, seconds, size, results):
        return seconds + {"ring": size, "results": results}.get(self.kind, 0)


def costs(kind, **changed):
    return LayerCosts(describe({**MODEL, **changed}), Only(kind))


def seconds(part: Part):
    return part.forward_seconds, part.input_gradient_seconds, part.weight_gradient_seconds


def layer(kind, **changed):
    made = costs(kind, **changed)
    return self_attention(made) + (experts(made) if "num_experts" in changed else mlp(made))


@pytest.mark.parametrize(
    ("changed", "collectives"),
    [
        ({}, (0, 0, 0)),
        ({"tensor_model_parallel_size": 2}, (4, 4, 0)),
        ({"tensor_model_parallel_size": 4}, (4, 4, 0)),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, (4, 4, 0)),
    ],
)
def test_a_layer_s_collectives(changed, collectives):
    """arXiv 2205.05198, section 4.2: two all-reduces a pass, each half of it a gather; the same number with
    sequence parallelism, and in W the inputs of both column-parallel products and the gradients of both
    row-parallel ones.  A whole backward has those inputs alone.  Here products take no time and hide none."""
    found = layer("gather", **changed)
    assert seconds(found) == tuple(HIDDEN * count for count in collectives)
    whole = found.backward_seconds - found.overlapped_in_whole
    assert found.gathering == (4 * HIDDEN if "sequence_parallel" in changed else 0)
    assert whole == HIDDEN * (6 if "sequence_parallel" in changed else collectives[1])


def test_inputs_that_an_i_gathers_though_w_alone_reads_them():
    """Quantized ones, and those of a layer without a norm; a whole backward takes as long either way."""
    about = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    local, engine = (
        costs("gather", **about, transformer_impl=one).products.column(8, is_normed=False)
        for one in ("local", "transformer_engine")
    )
    assert engine.input_gradient_seconds - local.input_gradient_seconds == HIDDEN
    whole = [part.input_gradient_seconds - part.overlapped_in_whole for part in (local, engine)]
    assert whole[0] == whole[1]


@pytest.mark.parametrize(("parallel", "collectives"), [(False, 4), (True, 4)])
def test_collectives_that_long_products_hide(parallel, collectives):
    """I's products hide the gathering for W, and W's hide what I's column-parallel products sum."""

    class Both(Only):
        def product(self, m, n, k, adds=False, is_output=False, groups=1):
            return 1e12

    job = describe({**MODEL, "tensor_model_parallel_size": 4, "sequence_parallel": parallel})
    made = LayerCosts(job, Both("gather"))
    found = self_attention(made) + mlp(made)
    assert found.input_gradient_seconds == 4e12 + collectives * HIDDEN
    assert found.lent_seconds == 2e12 and found.hidden_beside == found.overlapped_in_whole
    assert found.overlapped_in_whole == 2 * HIDDEN * (1 if parallel else 2)
    alone, together = found.costs(), found.input_gradient_seconds + 4e12 - found.overlapped_in_whole
    assert (alone.weight_gradient, alone.seconds(Kind.B)) == (4e12 + parallel * HIDDEN, together)


@pytest.mark.parametrize(("parallel", "collectives"), [(False, (0, 2, 0)), (True, (1, 2, 0))])
def test_the_output_layer_s_collectives(parallel, collectives):
    """Logits stay where they are; only its input is gathered, also for W, and its input's gradient summed."""
    layer = output(costs("gather", tensor_model_parallel_size=2, sequence_parallel=parallel), V)
    assert seconds(layer) == tuple(HIDDEN * count for count in collectives)
    assert layer.gathering == parallel * HIDDEN


def test_operands_in_fp8_are_gathered_in_fp8():
    """Half the bytes of both inputs in F, of both output gradients and both inputs in I, and of these in W.

    Sums stay whole.

    What an expert's tokens are gathered in is not their products' business."""
    sizes = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "fp8": "hybrid"}
    found = layer("gather", **sizes)
    assert seconds(found) == ((2 / 2 + 2) * HIDDEN, (2 / 2 + 2 / 2 + 2) * HIDDEN, 0)
    assert found.gathering == 2 * HIDDEN
    head = output(costs("gather", **sizes), V)
    assert (*seconds(head), head.gathering) == (HIDDEN, 2 * HIDDEN, 0, HIDDEN)
    routed = {**EXPERTS, **sizes}
    half = {name: value for name, value in routed.items() if name != "fp8"}
    assert seconds(experts(costs("gather", **routed))) == seconds(experts(costs("gather", **half)))


def test_ranks_cast_their_part_of_what_is_gathered():
    """Two of four products gather their inputs, and the other two the gradients of their results."""
    sizes = {"tensor_model_parallel_size": 4, "fp8": "hybrid"}
    tokens = S * B
    whole = layer("cast", **sizes)
    cut = layer("cast", **sizes, sequence_parallel=True)
    inner = (H + 4 * H) / 4
    assert seconds(whole) == (tokens * (2 * H + inner), tokens * ((3 * H + 4 * H) / 4 + 2 * H), 0)
    saved = 2 * tokens * H * 3 / 4
    assert seconds(cut) == (whole.forward_seconds - saved, whole.input_gradient_seconds - saved, 0)


@pytest.mark.parametrize("tensor", [1, 2])
def test_routing_shuffles_tokens_there_and_back(tensor):
    """Each of a token's experts gets the token and returns a result, in F and again in I, W sends nothing."""
    made = costs("shuffle", tensor_model_parallel_size=tensor, sequence_parallel=True, **EXPERTS)
    sent = 2 * HIDDEN / tensor
    assert seconds(experts(made)) == (2 * sent, 2 * sent, 0)
    assert seconds(self_attention(made) + mlp(made)) == (0, 0, 0)


@pytest.mark.parametrize(("changed", "heads"), [({}, A), (GROUPED, 2)])
def test_context_parallel_ranks_exchange_keys_and_values(changed, heads):
    """Ring attention sends keys and values in F, and with their gradients in I; queries stay."""
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4, **changed}
    keys = (S / 4) * B * heads * (H / A) / 2
    assert seconds(self_attention(costs("ring", **sizes))) == (2 * 2 * keys, 2 * 2 * 2 * keys, 0)
    queries = (S / 4) * B * H / 2
    assert seconds(self_attention(costs("results", **sizes))) == (queries, queries + 2 * keys, 0)


def test_what_is_copied_in_a_dense_layer():
    """Two norms with a residual addition move five activations each; the MLP's function reads and writes the
    inner width, and its backward reads one more."""
    inner = 2 * S * B * 4 * H
    assert seconds(layer("copy")) == (2 * 5 * HIDDEN + 2 * inner, 2 * 5 * HIDDEN + 3 * inner, 0)
    gated = 2 * S * B * 768
    assert seconds(layer("copy", **GATED)) == (10 * HIDDEN + 3 * gated, 10 * HIDDEN + 5 * gated, 0)


def test_what_dropout_copies():
    """The mask is written, and read with a gradient that is written: behind attention and behind the MLP."""
    plain, dropped = (layer("copy", hidden_dropout=p) for p in (0.0, 0.1))
    assert seconds(dropped) == (
        plain.forward_seconds + HIDDEN,
        plain.input_gradient_seconds + HIDDEN + 4 * HIDDEN,
        0,
    )
    assert dropped.after_forward - plain.after_forward == HIDDEN


def test_what_is_copied_in_a_layer_of_experts():
    """Its own inner width twice a token and twice more where it is multiplied by probabilities, the tokens
    put in order four times, read and written each, of which two times a token is read or written once
    for its two experts, fourteen more for the biases of its results, or twenty in the backward, and the
    router's three numbers for eight experts each."""
    inner, sent, routed = 2 * 2 * S * B * 384, 2 * HIDDEN, 2 * 3 * 4 * S * B * 8
    found = seconds(experts(costs("copy", **EXPERTS)))
    assert found == (
        5 * HIDDEN + 4 * inner + (7 + 14) * sent + routed,
        5 * HIDDEN + 6 * inner + (7 + 20) * sent + routed,
        0,
    )


def test_clamps_before_a_fused_activation_are_kernels_of_their_own():
    """Both halves are read, written and joined; the backward has a mask for each of three bounds."""
    plain, clamped = (
        experts(costs("copy", **EXPERTS, quick_geglu=True, activation_func_clamp_value=most))
        for most in (None, 7.0)
    )
    width = 2 * 2 * S * B * 384
    assert clamped.forward_seconds - plain.forward_seconds == 8 * width
    assert clamped.input_gradient_seconds - plain.input_gradient_seconds == 15 * width
    assert clamped.after_forward - plain.after_forward == 2 * width


MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "moe_grouped_gemm": True, "swiglu": True}


@pytest.mark.parametrize("kind", ["copy", "cast"])
def test_products_of_experts_that_are_fused_copy_no_activations_or_biases(kind):
    """Only tokens as they come, and their gradients, are still cast."""
    plain, fused = (
        experts(costs(kind, **EXPERTS, **MXFP8, use_transformer_engine_op_fuser=is_fused))
        for is_fused in (False, True)
    )
    inner, sent = 2 * 2 * S * B * 384, 2 * HIDDEN
    less = (3 * inner + 14 * sent, 5 * inner + 20 * sent) if kind == "copy" else (inner / 2, inner)
    assert plain.forward_seconds - fused.forward_seconds == less[0]
    assert plain.input_gradient_seconds - fused.input_gradient_seconds == less[1]
    half = experts(costs(kind, **EXPERTS, use_transformer_engine_op_fuser=True))
    assert half == experts(costs(kind, **EXPERTS))


def test_a_paged_stash_copies_what_experts_keep_into_pages_and_back():
    plain, paged = (experts(costs("copy", **EXPERTS, moe_paged_stash=is_paged)) for is_paged in (False, True))
    kept = 2 * 2 * S * B * 384 * 3 + 2 * HIDDEN
    assert paged.forward_seconds - plain.forward_seconds == 2 * kept
    assert paged.input_gradient_seconds - plain.input_gradient_seconds == 2 * kept


def test_positions_and_the_order_of_heads_are_copied_around_attention():
    """Queries and keys are rotated; unfused attention also puts all three in the order of heads."""
    plain, rotated, unfused = (
        self_attention(costs("copy", **changed)).forward_seconds
        for changed in ({}, {"position_embedding_type": "rope"}, {"transformer_impl": "local"})
    )
    assert rotated - plain == 2 * 2 * HIDDEN
    assert unfused - plain == 2 * 3 * HIDDEN


def test_what_the_loss_copies():
    """Beside the last norm: logits of two bytes become four; a maximum and a sum are read, and a difference,
    an exponential and a quotient read and written; backwards a product, and two bytes again."""
    logits = 4 * S * B * V / 2
    made = costs("copy", tensor_model_parallel_size=2)
    head = made.norm() + output(made, V)
    assert seconds(head) == (5 * HIDDEN + 8.5 * logits, 5 * HIDDEN + 3.5 * logits, 0)
    assert head.after_forward == 2 * HIDDEN + logits


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("changed", [{}, GROUPED, GATED, {**GROUPED, **GATED}], ids=str)
def test_products_cost_the_same_in_f_i_and_w(changed, tensor):
    """Two operations for each token and weight (arXiv 2401.10241, table 3)."""
    heads = 2 if "num_query_groups" in changed else A
    inner = 3 * 768 if "swiglu" in changed else 2 * 4 * H
    weights = (2 * H * H + 2 * H * heads * (H // A) + H * inner) / tensor
    found = layer("product", tensor_model_parallel_size=tensor, **changed)
    assert seconds(found) == (2 * S * B * weights,) * 3
    assert found.weight_operations == 2 * S * B * weights


def test_experts_run_the_tokens_that_are_sent_to_them():
    """Two of eight: twice the tokens through one expert's weights, and eight experts' weights kept."""
    found = experts(costs("product", **EXPERTS))
    weights, router = 2 * H * 384, 2 * S * B * 8 * H
    products = 2 * 2 * S * B * weights
    assert seconds(found) == (products + router, products + 2 * router, products)
    assert found.expert_parameters == 8 * (weights + 384 + H)


@pytest.mark.parametrize(
    ("pads", "factor", "taken"),
    [(True, 1.5, 1.5), (True, 0.5, 0.5), (False, 1.5, 1), (False, 0.5, 0.5), (False, -1, 1)],
)
@pytest.mark.parametrize("kind", ["product", "shuffle"])
def test_a_capacity_drops_tokens_and_padding_fills_it(kind, pads, factor, taken):
    capacity = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": pads}
    all_of_them, router = (
        experts(costs(kind, **EXPERTS, **more))
        for more in ({}, {**capacity, "moe_expert_capacity_factor": 1e-9})
    )
    found = experts(costs(kind, **EXPERTS, **capacity))
    for every, none, one in zip(*map(seconds, (all_of_them, router, found)), strict=True):
        assert one - none == pytest.approx(taken * (every - none))


def test_a_shared_expert_is_dense():
    shared = {"moe_shared_expert_intermediate_size": 640}
    with_it, without = (experts(costs("product", **EXPERTS, **more)) for more in (shared, {}))
    assert with_it.parameters - without.parameters == 2 * H * 640 + 640 + H
    assert with_it.expert_parameters == without.expert_parameters
    assert with_it.forward_seconds - without.forward_seconds == 2 * S * B * 2 * H * 640


def test_weight_gradients_alone_add_to_a_buffer():
    assert seconds(layer("adding")) == (0, 0, 4)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (2, 4)])
def test_attention_itself(tensor, context):
    """Two products of every query with every key of the whole sequence, twice as many in I, none in W."""
    found = layer("attention", tensor_model_parallel_size=tensor, context_parallel_size=context)
    operations = 2 * 2 * (S / context) * B * S * H / tensor
    assert seconds(found) == (operations, 2 * operations, 0)
    assert found.activation_operations == operations


def test_scores_are_a_number_for_each_head_query_and_key():
    found = layer("scores", tensor_model_parallel_size=2)
    assert found.forward_seconds == 2 * A * S * S * B / 2


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_with_and_without_biases(bias, tensor):
    """Two norms; four products, of which the column-parallel ones share their biases out."""
    found = layer("product", tensor_model_parallel_size=tensor, add_bias_linear=bias)
    weights = (3 + 1 + 4 + 4) * H * H / tensor
    biases = (3 * H + 4 * H) / tensor + H + H
    assert found.parameters == weights + bias * biases + 2 * 2 * H
    root = layer("product", tensor_model_parallel_size=tensor, add_bias_linear=bias, normalization="RMSNorm")
    assert found.parameters - root.parameters == 2 * H


def test_the_output_layer_has_no_bias_and_the_embedding_its_positions():
    made = costs("product", tensor_model_parallel_size=2)
    assert (output(made, V).parameters, made.norm().parameters) == (V * H / 2, 2 * H)
    assert (table(made, V).parameters, positions(made).parameters) == (V * H / 2, S * H)
    assert positions(costs("product", position_embedding_type="rope")).parameters == 0


@pytest.mark.parametrize(
    ("changed", "inner"),
    [
        ({}, 4 * H),
        ({"ffn_hidden_size": 640}, 640),
        ({"swiglu": True}, 640),
        ({"swiglu": True, "hidden_size": 512}, 1344),
    ],
)
def test_the_default_width_of_an_mlp_is_megatrons(changed, inner):
    """4 h; with a gate int(4 h * 2 / 3 / 64) * 64."""
    hidden = changed.get("hidden_size", H)
    found = mlp(costs("product", add_bias_linear=False, **changed))
    assert found.parameters == hidden * inner * (3 if "swiglu" in changed else 2) + 2 * hidden


@pytest.mark.parametrize(
    ("made_by", "gathered"),
    [({}, 1 / 2), ({"transformer_impl": "local"}, 1 / 2), ({"tp_comm_overlap": True}, 1 / 2)],
)
def test_what_is_kept_for_w(made_by, gathered):
    """Input and output gradient of all four products.

    Under sequence parallelism a row-parallel product keeps a part of its input, a column-parallel one of the
    gradient, and both their own part of what is gathered, also by userbuffers of Transformer Engine.
    """
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **made_by}
    plain = (1 + 3) + (1 + 1) + (1 + 4) + (4 + 1)
    assert layer("product", **made_by).after_input_gradient == plain * HIDDEN
    columns, rows = 2 * gathered + (3 + 4) / 2, (1 + 4) / 2 + 2 * gathered
    assert layer("product", **split).after_input_gradient == (columns + rows) * HIDDEN
    head = output(costs("product", **split), V).after_input_gradient
    assert head == HIDDEN / 2 + 2 * S * B * V / 2  # no layer of Transformer Engine's


LLAMA_70B = {
    "num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64,
    "group_query_attention": True, "num_query_groups": 8, "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "attention_dropout": 0.0,
    "tensor_model_parallel_size": 8, "sequence_parallel": True,
}  # fmt: skip


def test_what_waits_for_w_in_a_layer_of_llama_3_70b():
    """A forward keeps 16.75 eighths of hidden x tokens, and so does W, which gathers what ranks divide."""
    found = layer("product", **LLAMA_70B)
    eighth = 2 * S * B * 8192 / 8
    assert (found.after_forward, found.after_input_gradient) == (16.75 * eighth, 16.75 * eighth)


@pytest.mark.parametrize("product_seconds", [0.0, 1e12])
def test_w_gathers_again_beside_earlier_products(product_seconds):
    """Two inputs and two gradients a layer; the first gather is beside no product, and a B has none."""

    class Both(Only):
        def product(self, m, n, k, adds=False, is_output=False, groups=1):
            return product_seconds

        def copy(self, size):
            return 1e12

    changed = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    gathered, whole = (
        self_attention(made) + mlp(made)
        for made in (
            LayerCosts(describe({**MODEL, **changed, "sequence_parallel": is_cut}), Both("gather"))
            for is_cut in (True, False)
        )
    )
    for part, layers in ((gathered, 1), (gathered.times(3), 3), (gathered + gathered, 2)):
        products = 4 * product_seconds * layers
        ahead = 0 if product_seconds else 4 * HIDDEN * layers
        assert (part.weight_gradient_seconds, part.gathering) == (products, 4 * HIDDEN * layers)
        assert part.exposed_gathering == ahead + HIDDEN
    split = gathered.costs() if product_seconds else None
    assert split is None or split.weight_gradient == 4 * product_seconds + HIDDEN
    assert split is None or split.seconds(Kind.B) == gathered.backward_seconds - gathered.overlapped_in_whole
    assert (whole.gathering, whole.exposed_gathering) == (0, 0)


def test_w_gathers_in_three_buffers_of_the_largest_operand():
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

    def buffers(**changed):
        return model_parts(describe({**MODEL, **split, **changed})).gather_buffers

    assert buffers() == buffers(transformer_impl="local") == 3 * HIDDEN
    assert buffers(fp8="hybrid") == 3 * HIDDEN, "the output layer's"
    assert buffers(sequence_parallel=False) == buffers(tensor_model_parallel_size=1) == 0


@pytest.mark.parametrize(("tensor", "own"), [(1, 1), (4, 4), (4, 2), (4, 1)])
def test_what_experts_keep(tensor, own):
    """Tokens of the ranks that share an expert: its products' inputs, and for W both gradients too."""
    sizes = {"tensor_model_parallel_size": tensor, "expert_tensor_parallel_size": own}
    found = experts(costs("product", sequence_parallel=True, **EXPERTS, **sizes))
    tokens, inner = 2 * HIDDEN * own / tensor, 2 * 2 * S * B * 384 / tensor
    assert found.after_input_gradient == 2 * tokens + 2 * inner
    router = 3 * 4 * S * B * 8 / tensor
    assert found.after_forward == 2 * HIDDEN / tensor + tokens + 3 * inner + router


def test_one_expert_a_token_is_an_expert():
    """What it reads is gathered by the dispatcher, in bf16, and by nobody for W."""
    one = {**EXPERTS, "moe_router_topk": 1, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert seconds(experts(costs("cast", fp8="hybrid", **one))) == tuple(
        second / 2
        for second in seconds(experts(costs("cast", fp8="hybrid", **{**one, "moe_router_topk": 2})))
    )


@pytest.mark.parametrize(
    ("changed", "gradients"),
    [
        ({"moe_grouped_gemm": True}, 0),
        ({"gradient_accumulation_fusion": False}, 0),
        ({"moe_grouped_gemm": True, "gradient_accumulation_fusion": False}, 1),
    ],
)
def test_grouped_products_keep_the_gradients_that_w_does_not_add(changed, gradients):
    """A number for each weight of the rank's experts, which no token count changes."""
    kept = experts(costs("product", **EXPERTS)).after_input_gradient
    found = experts(costs("product", **EXPERTS, **changed)).after_input_gradient
    assert found - kept == gradients * 2 * 8 * 2 * H * 384


def test_selective_recomputation_leaves_out_what_it_names():
    """Each module's bytes disappear between F and I, and its forward runs again in I."""

    def made(modules, kind="copy", **changed):
        again = {"recompute_granularity": "selective", "recompute_modules": modules}
        return layer(kind, transformer_impl="local", **changed, **(again if modules else {}))

    inner = 2 * S * B * 4 * H
    none, mlp, norms = made([]), made(["mlp"]), made(["layernorm"])
    assert none.after_forward - mlp.after_forward == 2 * inner
    assert mlp.input_gradient_seconds - none.input_gradient_seconds == 2 * inner
    assert none.after_forward - norms.after_forward == 2 * HIDDEN
    kept = {"attention_dropout": 0.0}
    plain, attention = made([], "attention", **kept), made(["core_attn"], "attention", **kept)
    assert plain.after_forward - attention.after_forward == 2 * A * S * S * B
    assert attention.input_gradient_seconds == 3 * plain.forward_seconds


def test_recomputed_experts():
    def made(modules):
        again = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
        shared = {"moe_shared_expert_intermediate_size": 640}
        return experts(costs("copy", **EXPERTS, **shared, **again))

    none = made([])
    chosen, inner, shared = 2, 2 * S * B * 384, 2 * S * B * 640
    assert none.after_forward - made(["shared_experts"]).after_forward == 2 * shared
    assert made(["moe"]).after_forward == 2 * HIDDEN
    # What the probabilities multiply, and the product.
    assert none.after_forward - made(["moe_act"]).after_forward == 2 * chosen * inner
    assert made(["moe_act"]).input_gradient_seconds - none.input_gradient_seconds == chosen * 4 * inner


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, 2), (0.1, 2 + 2 + 1)])
def test_unfused_attention_keeps_its_probabilities(dropout, kept):
    """In bf16, with dropout their copy, and a mask of a byte (arXiv 2205.05198, section 4.1)."""
    unfused, fused = (
        self_attention(costs("copy", attention_dropout=dropout, transformer_impl=which)).after_forward
        for which in ("local", "transformer_engine")
    )
    assert unfused - fused == kept * A * S * S * B


def test_the_mask_of_dropout_is_a_byte_a_number():
    with_, without = (layer("copy", hidden_dropout=p).after_forward for p in (0.1, 0.0))
    assert with_ - without == 2 * S * B * H
    with_, without = (positions(costs("copy", hidden_dropout=p)).after_forward for p in (0.1, 0.0))
    assert (with_, without) == (S * B * H, 0)


def test_a_depth_of_prediction_joins_two_hidden_states():
    """A product from twice the hidden size; the inputs of two norms and their joined results are kept."""
    found = prediction(costs("product"))
    assert found.weight_operations == 2 * S * B * 2 * H * H
    assert (found.after_forward, found.after_input_gradient) == (4 * HIDDEN, 3 * HIDDEN)


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ({}, 2),
        ({"bf16": False}, 0),
        ({"cross_entropy_loss_fusion": True}, 2 + 4),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, 0),
    ],
)
def test_the_loss_s_workspace(flags, each):
    """Logits as the product makes them, a part on each tensor-parallel rank; compiled, a copy in fp32 too."""
    assert loss_workspace(costs("copy", tensor_model_parallel_size=2, **flags), V) == each * S * B * V / 2


def placeholders(**changed):
    """Return the bytes of buffers besides both workspaces of cuBLAS, PyTorch's and Transformer Engine's."""
    return model_parts(describe({**MODEL, **changed})).buffers - 2 * 2**25


def test_products_of_one_shape_share_a_placeholder_for_their_gradients():
    """Attention has two shapes of weights and the MLP two, however many layers there are."""
    found = placeholders()
    assert found == 2 * (H * 3 * H + H * H + 2 * H * 4 * H)
    assert placeholders(num_layers=4) == found
    assert placeholders(tensor_model_parallel_size=2) == found / 2
    assert placeholders(gradient_accumulation_fusion=False) == 0


def test_experts_share_placeholders_too():
    assert placeholders(**EXPERTS) == 2 * (H * 3 * H + H * H + 2 * H * 384)


def test_products_of_experts_have_a_workspace_on_each_stream():
    assert placeholders(**EXPERTS, moe_grouped_gemm=True) == placeholders(**EXPERTS) + 4 * 2**25
    assert model_parts(describe({**MODEL, "transformer_impl": "local"})).buffers == 2**25


def test_the_output_layer_has_a_placeholder():
    assert of_output(costs("copy"), V) == 2 * V * H
    assert of_output(costs("copy", tensor_model_parallel_size=2), V) == V * H
    assert of_output(costs("copy", gradient_accumulation_fusion=False), V) == 0


@pytest.mark.parametrize(("cut", "size"), [({}, 0), ({"sequence_parallel": True}, HIDDEN)])
def test_the_output_layer_gathers_its_input_into_one_buffer(cut, size):
    assert gathered(costs("copy", tensor_model_parallel_size=2, **cut)) == size


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ({}, 1),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 1),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 2),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 3),
        ({"fp4": "e2m1", "fp8_recipe": "tensorwise"}, 1),
    ],
)
def test_the_products_and_casts_of_each_expert_are_launched(flags: dict[str, str], each: int) -> None:
    """With twice the experts on a rank there are as many more launches for each of both products."""

    class Launches(KernelSeconds):
        def launched(self, part: Part, kernels: float, has_routed: bool = False) -> Part:
            return part + Part(forward_seconds=kernels)

    def launched(count: int, **changed: object) -> float:
        model = {**MODEL, **EXPERTS, "moe_grouped_gemm": True, "num_experts": count, **flags, **changed}
        with_launches, without = (
            experts(LayerCosts(describe(model), kernels)).forward_seconds
            for kernels in (Launches(), KernelSeconds())
        )
        return with_launches - without

    assert launched(16) - launched(8) == pytest.approx(8 * 2 * each, abs=1e-3)
    if flags.get("fp8_recipe") == "mxfp8":
        fused = {"use_transformer_engine_op_fuser": True}
        assert launched(16, **fused) == pytest.approx(launched(8, **fused), abs=1e-3)


@pytest.mark.parametrize(("context", "copies"), [(2, 1), (4, 2)])
def test_slices_exchange_heads_among_context_parallel_ranks(context, copies):
    """Before attention queries, keys and values, which are repeated for ranks without some, and after it the
    results; of whole sequences keys and values go round."""
    shared = {"context_parallel_size": context, "pipeline_slice_tokens": S, **GROUPED}
    head, of_rank = H // A, 2 * B * S // context
    part = self_attention(costs("exchange", **shared))
    sent = of_rank * head * (A + 2 * 2 * copies + A)
    assert (part.forward_seconds, part.input_gradient_seconds) == (sent, sent)
    assert self_attention(costs("ring", **shared)).forward_seconds == 0
    assert part.stored == of_rank * 2 * 2 * copies * head
    whole = {**shared, "pipeline_slice_tokens": None}
    assert self_attention(costs("exchange", **whole)).forward_seconds == 0
    assert self_attention(costs("ring", **whole)).forward_seconds == of_rank * 2 * 2 * head
