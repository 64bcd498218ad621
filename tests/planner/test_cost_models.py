"""The models of memory and time against published formulas and sums by hand."""

import math

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.mlp import mlp
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.estimate import StepModel, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.programs import placement_of, program
from megatron_pp_ext.planner.step.workload import Workload

GPT3 = {
    "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048,
    "vocab_size": 51200,
    "max_position_embeddings": 2048, "bf16": True, "micro_batch_size": 1, "global_batch_size": 64,
}  # fmt: skip
SMALL = {**GPT3, "num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
A100 = system.read("a100-80g")


def work(ranks=4, name="1f1b", data=1, chunks=1, **changed):
    job = describe({**SMALL, "pipeline_model_parallel_size": ranks, **changed})
    return Workload(job, A100, placement_of(name, ranks, chunks), data)


def layer(**changed):
    job = describe({**GPT3, "attention_backend": "unfused", **changed})
    costs = LayerCosts(job)
    return self_attention(costs) + mlp(costs)


S, B, H, A = 2048, 1, 12288, 96


TENSOR = {"tensor_model_parallel_size": 8}
SEQUENCE = {**TENSOR, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("changed", "published"),
    [
        ({}, S * B * H * (34 + 5 * A * S / H)),
        (TENSOR, S * B * H * (10 + 24 / 8 + 5 * A * S / (H * 8))),
        (SEQUENCE, S * B * H / 8 * (34 + 5 * A * S / H)),
        ({**SEQUENCE, "recompute_granularity": "selective"}, S * B * H * 34 / 8),
    ],
)
def test_activation_bytes_are_megatrons_published_ones(changed, published):
    """arXiv 2205.05198, table 2: bytes of a layer, dropout included."""
    assert layer(**changed).after_forward == pytest.approx(published)


def test_parameters_and_operations_of_gpt3():
    """arXiv 2104.04473: 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) parameters (equation 2), 174.6 billion.

    Operations without recomputation (equation 3): 72 B s L h^2 (1 + s/(6h) + V/(12 L h)).
    """
    whole = Workload(describe(GPT3), A100, placement_of("none", 1, 1), 1)
    parameters = 12 * 96 * H**2 * (1 + 13 / (12 * H) + (51200 + S) / (12 * 96 * H))
    assert whole.states[0].weights / 2 == pytest.approx(parameters, rel=1e-3)
    operations = 72 * S * 96 * H**2 * (1 + S / (6 * H) + 51200 / (12 * 96 * H))
    counted = 3 * sum(each.forward_operations for each in whole.parts)
    assert counted == pytest.approx(operations, rel=1e-3)


def test_a_v_puts_embedding_and_output_layer_on_the_first_rank():
    line, v = work(4), work(4, "v-half", chunks=2)
    embedding = 2 * 51200 * 1024
    assert v.head_rank == 0
    assert line.head_rank == 3
    assert v.states[0].weights - v.states[1].weights == pytest.approx(2 * embedding, rel=0.03)
    assert line.states[3].weights - line.states[1].weights == pytest.approx(embedding, rel=0.01)


def test_pipedream_keeps_older_versions():
    def versions(name, microbatches, **changed):
        order = program(name, 4, microbatches, 1)
        ranks = StepModel(work(4, **changed), order, name, microbatches).estimate().ranks
        return [rank.versions / rank.weights for rank in ranks]

    assert versions("pipedream", 1) == [3, 2, 1, 0]
    assert versions("pipedream", 2) == [2, 1, 1, 0]
    assert versions("pipedream", 8) == [1, 1, 1, 0]
    assert versions("pipedream", 1, pipeline_vertical_sync=True) == [3, 3, 3, 3]
    assert versions("pipedream-2bw", 8) == [1, 1, 1, 1]


def test_a_pipeline_that_never_flushes_is_full_however_few_its_microbatches():
    """A long run's step has no bubble: the busiest rank's microbatches, and what follows the pipeline."""
    made = work(4)
    busiest = max(
        p.forward_seconds + p.input_gradient_seconds + p.weight_gradient_seconds for p in made.by_rank
    )
    kept = set()
    for m in (1, 3, 16):
        found = StepModel(made, program("pipedream", 4, m, 1), "pipedream", m).estimate()
        assert found.pipeline_seconds == pytest.approx(m * busiest)
        kept.add(tuple(rank.activations for rank in found.ranks))
    assert len(kept) == 1


def test_what_is_recomputed_takes_time_and_saves_memory():
    kept, again = (
        StepModel(work(4, **changed), program("1f1b", 4, 16, 1), "1f1b", 16).estimate()
        for changed in ({}, {"recompute_granularity": "full", "recompute_method": "uniform"})
    )
    assert 1.15 < again.pipeline_seconds / kept.pipeline_seconds < 1.35
    assert again.ranks[0].activations < kept.ranks[0].activations / 4


@pytest.mark.parametrize(
    ("changed", "gpus", "message"),
    [
        ({"pipeline_model_parallel_size": 5}, 5,
         "does not fill 5 stages evenly; let .* auto choose uneven stages, or set it to 15 or 20"),
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1,
          "decoder_last_pipeline_num_layers": 3}, 2,
         "-layers 1 and .*-layers 3 make 4 layers, but --num-layers is 16 and there is no other rank; "),
        ({"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 17}, 3,
         "--decoder-first-pipeline-num-layers 17 make 17 layers, but --num-layers is 16; change"),
        ({"pipeline_schedule": "v-half"}, 1, "needs a pipeline of 2 ranks or more"),
        ({"pipeline_schedule": "v-half", "pipeline_model_parallel_size": 2,
          "num_virtual_stages_per_pipeline_rank": 4}, 2, "v-half has 2 chunk.* requests 4; set it to 2"),
        ({"pipeline_schedule": "auto", "pipeline_model_parallel_size": 2}, 2, "cannot be estimated"),
        ({"pipeline_schedule": "pipedream", "pipeline_model_parallel_size": 2,
          "untie_embeddings_and_output_weights": True}, 2, "updates every 1 .* makes 64 a step"),
        ({"pipeline_schedule": "flex", "pipeline_model_parallel_size": 2}, 2, "needs --pipeline-memory"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_go_together_are_refused(changed, gpus, message):
    """Mistakes that only data and tensor parallelism meet are in tests/job/test_sizes.py."""
    with pytest.raises(ValueError, match=message):
        job = describe({**SMALL, **changed})
        estimate_request(job, A100, for_world(asked_of(job), gpus))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**SMALL, "tensor_model_parallel_size": 0}, "size 0, but it must be a whole number of 1 or more"),
        ({**SMALL, "hidden_size": "1024"}, "--hidden-size '1024', but it must be a whole number"),
        ({**SMALL, "ffn_hidden_size": -4096}, "--ffn-hidden-size -4096, but it must be a whole number"),
        ({**SMALL, "micro_batch_size": True}, "--micro-batch-size True"),
        ({**SMALL, "recompute_granularity": "ful"}, "granularity 'ful', but it must be one of full, select"),
        ({**SMALL, "hidden_dropout": math.nan}, "--hidden-dropout nan, but it must be a finite number"),
        ({**SMALL, "attention_dropout": "0.1"}, "--attention-dropout '0.1', but it must be a finite number"),
        ({**SMALL, "pipeline_memory_limit": math.inf}, "-memory-limit inf, but it must be a number above 0"),
        ({**SMALL, "pipeline_memory_limit": [0.5]}, r"-memory-limit \[0.5\], but it must be a number"),
        ({**SMALL, "swiglu": "no"}, "--swiglu 'no', but it must be true or false"),
        ({**SMALL, "num_experts": 8, "moe_layer_freq": [1, 0]}, "a list of 0 and 1, one a layer"),
        ({**SMALL, "num_experts": 8, "moe_layer_freq": 0}, "--moe-layer-freq 0, but it must be a whole"),
        ({**SMALL, "fp16": True}, "--bf16 and --fp16 contradict each other"),
        ({"num_layer": 1}, "'num_layer' is unknown: did you mean 'num_layers'"),
        ({"num_layers": 1}, "has no --hidden-size: give it"),
    ],
)
def test_what_no_model_has_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        describe(values)
