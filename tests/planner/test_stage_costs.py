"""What a stage costs as a whole: recomputed layers, the ends of the model, numbers of parameters."""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.mlp import experts, mlp
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.optimizers import Sharing, model_state
from megatron_pp_ext.costs.part import Matrices, Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.costs.stages import stage_parts
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.layout.cut import bounds
from megatron_pp_ext.planner.layout.rows import ModelStages, StageSeconds, seconds_of
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import linear

S, H, V = 512, 256, 1024
HIDDEN = 2 * S * H
EXACT = {"make_vocab_size_divisible_by": 1}
MODEL = {
    "num_layers": 8, "hidden_size": H, "num_attention_heads": 8, "seq_length": S, "micro_batch_size": 1,
    "vocab_size": V, "max_position_embeddings": S, "bf16": True, "hidden_dropout": 0.0,
}  # fmt: skip


def model(**changed):
    job = describe({**MODEL, **changed})
    return job, model_parts(job, vocabulary=V)


def stages(layers=(4, 4), **changed):
    job, made = model(**changed)
    return made, stage_parts(job, made, layers)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_those_of_the_published_files(name, parameters):
    """The sums of all tensors in the models' own files (their index of safetensors)."""
    assert on_one_rank(**described.named(name).described.values, **EXACT) == parameters


def on_one_rank(**values):
    job = describe({"micro_batch_size": 1, **values})
    (part,) = Workload(job, system.read("h100"), linear(1), 1).by_rank
    return part.parameters + part.expert_parameters


LLAMA = {**described.named("llama3-8b").described.values, **EXACT}


@pytest.mark.parametrize(
    "changed",
    [
        {"swiglu": False, "quick_geglu": True},
        {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True},
        {"position_embedding_type": "yarn"},
        {"pad_vocab_size": False, "make_vocab_size_divisible_by": 100_000},
    ],
)
def test_other_flags_for_the_same_parameters(changed):
    assert on_one_rank(**{**LLAMA, **changed}) == 8_030_261_248


def test_biases_of_attention_alone():
    queries, keys_and_values = 32 * 128, 2 * 8 * 128
    biased = on_one_rank(**{**LLAMA, "add_qkv_bias": True}) - on_one_rank(**LLAMA)
    assert biased == 32 * (queries + keys_and_values)


def test_a_single_rank_predicts_with_the_embedding_that_it_has():
    """Each depth has a layer, the projection of 2 x 4096 to 4096 numbers, two norms before it, and one before
    the output; repeated, there is one of all."""
    layer = (8_030_261_248 - 2 * 128_256 * 4096 - 4096) // 32
    for depths in (1, 2):
        more = on_one_rank(**LLAMA, mtp_num_layers=depths) - 8_030_261_248
        assert more == depths * (layer + 2 * 4096 * 4096 + 3 * 4096)
        again = on_one_rank(**LLAMA, mtp_num_layers=depths, mtp_use_repeated_layer=True) - 8_030_261_248
        assert again == more / depths


def test_the_ends_of_the_model_are_in_the_first_and_the_last_stage():
    made, (first, last) = stages()
    layer = made.layers[0]
    assert first.parameters == 4 * layer.parameters + V * H + S * H
    assert last.parameters == 4 * layer.parameters + V * H + 2 * H
    assert last.forward_seconds - first.forward_seconds == pytest.approx(made.head.forward_seconds)


def test_each_depth_of_prediction_has_a_layer_and_an_output_layer():
    _, (_, plain) = stages()
    made, (_, deep) = stages(mtp_num_layers=2)
    each = made.prediction + made.head
    assert made.prediction.weight_operations == made.layers[-1].weight_operations + 2 * S * 2 * H * H
    assert deep.weight_operations - plain.weight_operations == pytest.approx(2 * each.weight_operations)
    # All depths take the same copy of the embedding, and the output layer.
    assert deep.parameters - plain.parameters == 2 * made.prediction.parameters + made.output.parameters


def test_prediction_is_where_the_layout_puts_it():
    """With its copy of the embedding; its logits are computed where the loss is."""
    layout = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*8|m|L"}
    made, (_, predicting, last) = stages(layers=(8, 0, 0), **layout)
    each = made.prediction + made.other
    assert predicting.weight_operations == each.weight_operations
    assert predicting.parameters == each.parameters + made.output.parameters
    assert last.weight_operations == 2 * made.head.weight_operations + made.other.weight_operations
    assert last.parameters == made.head.parameters + made.other.parameters


FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(("number", "groups"), [(None, 4), (1, 4), (2, 2), (3, 2), (4, 1)])
def test_full_recomputation_keeps_the_input_of_each_group(number, groups):
    """Uniform: groups of so many layers, the last one as long as is left."""
    made, (first, _) = stages(**FULL, recompute_method="uniform", recompute_num_layers=number)
    layer, largest = made.layers[0], min(number or 1, 4)
    assert first.after_forward == groups * HIDDEN
    assert first.workspace_in_whole == largest * layer.after_forward
    assert first.workspace == largest * max(0, layer.after_forward - layer.after_input_gradient)
    assert first.repeated_operations == 4 * layer.forward_operations
    plain = stages()[1][0]
    assert first.input_gradient_seconds == pytest.approx(
        plain.input_gradient_seconds + 4 * layer.forward_seconds
    )


@pytest.mark.parametrize("number", [1, 3])
def test_block_recomputation_leaves_the_later_layers_alone(number):
    made, (first, _) = stages(**FULL, recompute_method="block", recompute_num_layers=number)
    assert first.after_forward == number * HIDDEN + (4 - number) * made.layers[0].after_forward
    assert first.repeated_operations == number * made.layers[0].forward_operations


def test_distributed_inputs_are_shared_by_tensor_parallel_ranks():
    changed = {"recompute_method": "uniform", "distribute_saved_activations": True}
    _, (first, _) = stages(**FULL, **changed, tensor_model_parallel_size=4)
    assert first.after_forward == 4 * HIDDEN / 4


def test_what_a_schedule_is_charged_for_a_recomputed_part():
    """40 bytes after F become 10; I makes 30 more, and they fall back to the 25 that W needs."""
    part = Part(1, 2, 0, 3.0, 4.0, 5.0, after_forward=40, after_input_gradient=25).recomputed(
        after_forward=10
    )
    assert (part.workspace, part.workspace_in_whole, part.repeated_operations) == (15, 40, 3)
    costs = part.costs()
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == (3, 7, 5)
    assert (costs.activation, costs.released_by_input_gradient, costs.workspace) == (10, -15, 15)
    assert (costs.growth(Kind.B), costs.kept(Kind.B)) == (40, -10)
    assert (costs.growth(Kind.I), costs.kept(Kind.I), costs.kept(Kind.W)) == (30, 15, -25)
    assert part.measured(costs, 0.0).costs() == costs


def test_parts_add_up_but_are_recomputed_one_after_the_other():
    *names, last = Part.__slots__
    assert last == "matrices"
    count = len(names)
    one, other = Part(*range(1, count + 1)), Part(*range(count, 0, -1))
    largest = {"workspace", "workspace_in_whole", "first_gathering", "of_layer"}
    both = [getattr(one + other, name) for name in names]
    assert both == [
        max(number, count + 1 - number) if name in largest else count + 1
        for number, name in enumerate(names, 1)
    ]
    thrice = [getattr(one.times(3), name) for name in names]
    assert thrice == [number if name in largest else 3 * number for number, name in enumerate(names, 1)]
    assert one.times(0) == Part()


def test_matrices_add_up_where_there_are_any_and_repeated_parts_have_weights_in_common():
    matrices = Matrices(1, 2, 3, 4)
    one = Part(*range(1, len(Part.__slots__)), matrices)
    other = Part(matrices=Matrices(10, 20, 30, 3))
    assert (one + other).matrices == Matrices(11, 22, 33, 4)
    assert (one + Part()).matrices == (Part() + one).matrices == matrices
    assert one.times(3).matrices == Matrices(3, 6, 9, 4)
    assert Part().times(3).matrices is None
    weights = {name for name in Part.__slots__ if "parameters" in name or name == "matrices"}
    for name in Part.__slots__:
        expected = one if name in weights else one.times(3)
        assert getattr(one.repeated(3), name) == getattr(expected, name), name


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, 4), ({"grad_reduce_in_bf16": True}, 2), ({"bf16": False}, 4), ({"bf16": False, "fp16": True}, 2),
        ({"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 4),
        ({"bf16": False, "grad_reduce_in_bf16": True}, 4),
    ],
)  # fmt: skip
def test_bytes_of_a_gradient(changed, size):
    assert describe({**MODEL, **changed}).precision.gradient_size == size


@pytest.mark.parametrize(
    ("changed", "data", "each"),
    [
        ({}, 1, 18), ({"use_distributed_optimizer": True}, 8, 6 + 12 / 8),
        ({"bf16": False}, 1, 16), ({"bf16": False, "use_distributed_optimizer": True}, 8, 8 + 8 / 8),
        ({"bf16": False, "fp16": True}, 1, 20),
        ({"optimizer": "sgd"}, 1, 14), ({"optimizer": "sgd", "sgd_momentum": 0.0}, 1, 10),
        ({"use_distributed_optimizer": True, "exp_avg_dtype": "fp8"}, 2, 6 + 9 / 2),
        ({"use_distributed_optimizer": True, "exp_avg_sq_dtype": "bf16"}, 2, 6 + 10 / 2),
        ({"use_distributed_optimizer": True, "main_params_dtype": "fp16"}, 2, 6 + 10 / 2),
    ],
)  # fmt: skip
def test_bytes_for_each_weight(changed, data, each):
    """Megatron-LM, docs of the distributed optimizer: the table of bytes for each parameter."""
    job = describe({**MODEL, **changed})
    state = model_state(job, Part(parameters=1.0), Sharing(dense=data, expert=1))
    assert state.weights + state.gradients + state.optimizer == pytest.approx(each)


def test_a_rank_with_both_ends_has_one_tied_weight():
    single, untied = (
        Workload(describe({**MODEL, **changed}), system.read("h100"), linear(1), 1).by_rank[0].parameters
        for changed in (EXACT, {**EXACT, "untie_embeddings_and_output_weights": True})
    )
    assert untied - single == V * H


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "padded"), [(50257, 1, 50304), (50257, 8, 51200), (51200, 8, 51200), (1, 2, 256)]
)
def test_a_vocabulary_is_padded_to_multiples_of_128_for_each_tensor_rank(vocabulary, tensor, padded):
    changed = {
        "vocab_size": vocabulary,
        "tensor_model_parallel_size": tensor,
        "make_vocab_size_divisible_by": 128,
    }
    assert describe({**MODEL, **changed}).padded_vocabulary == padded
    assert describe({**MODEL, **changed, "padded_vocab_size": 99}).padded_vocabulary == 99


@pytest.mark.parametrize(
    ("tensor", "expert_tensor", "factor"), [(1, None, 1), (4, None, 1), (4, 1, 4), (4, 2, 2)]
)
def test_an_expert_s_weights_are_shared_by_its_own_tensor_parallel_ranks(tensor, expert_tensor, factor):
    changed = {"num_experts": 4, "tensor_model_parallel_size": tensor, "add_bias_linear": False}
    job = describe({**MODEL, **changed, "expert_tensor_parallel_size": expert_tensor})
    assert experts(LayerCosts(job)).expert_parameters == 4 * 2 * H * 4 * H / tensor * factor


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [1] * 8), (2, [1, 0] * 4), (3, [1, 0, 0, 1, 0, 0, 1, 0]), ([0, 1] * 4, [0, 1] * 4)],
)
def test_layers_of_experts_come_as_often_as_asked(frequency, expected):
    _, made = model(num_experts=4, moe_layer_freq=frequency)
    assert [int(layer.expert_parameters > 0) for layer in made.layers] == expected


def test_hybrid_layers_are_those_of_the_pattern():
    job, made = model(hybrid_layer_pattern="*-*E", num_layers=None, num_experts=4)
    costs = LayerCosts(job)
    assert made.layers == (self_attention(costs), mlp(costs), self_attention(costs), experts(costs))
    with pytest.raises(ValueError, match="cannot estimate the layers X of --hybrid-layer-pattern; measure"):
        model(hybrid_layer_pattern="X*", num_layers=None)


@pytest.mark.parametrize("cut", [(3, 3, 3), (4, 4, 1), (4, 5, 0)])
def test_a_stage_alone_takes_the_seconds_of_one_in_a_pipeline(cut):
    """Also with multi-token prediction, the ninth item, beside layers, alone or before the last stage."""
    job, made = model(mtp_num_layers=1)
    row = ModelStages(job, StageSeconds(job, made), linear(3))
    laid_out = job.changed(pipeline_model_parallel_layout=row.spelled(cut))
    parts = stage_parts(laid_out, made, row.layers_of(cut))
    assert [row.seconds(*where) for where in bounds(cut)] == [
        pytest.approx(seconds_of(part.costs())) for part in parts
    ]
