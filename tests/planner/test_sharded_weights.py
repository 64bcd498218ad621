"""What data-parallel ranks share under Megatron-FSDP, and what of their traffic a step waits for."""

from dataclasses import replace

import pytest

from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe

MODEL = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 2048, "micro_batch_size": 1,
    "vocab_size": 1024, "max_position_embeddings": 2048, "bf16": True, "global_batch_size": 16,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_distributed_optimizer": True,
    "overlap_grad_reduce": True, "overlap_param_gather": True,
}  # fmt: skip
MACHINE = System(
    "test",
    8,
    80e9,
    {"bf16": [[64, 64, 64, 4e14]]},
    3e12,
    Link(1e12, 0),
    Link(1e11, 0),
    peak_rates={"bf16": 4e14},
)
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


def estimated(machine: System = MACHINE, **changed: object) -> Estimate:
    job = describe({**MODEL, **changed})
    return estimate_request(job, machine, for_world(asked_of(job), 8))


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [("no_shard", 1, 1), ("optim", 1, 1), ("optim_grads", 1, 8), ("optim_grads_params", 8, 8)],
)
def test_a_strategy_shards_weights_and_gradients(strategy: str, weights: int, gradients: int) -> None:
    plain = estimated().fullest
    found = estimated(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy).fullest
    assert found.weights == pytest.approx(plain.weights / weights)
    assert found.gradients == pytest.approx(plain.gradients / gradients)
    assert found.optimizer == plain.optimizer


def test_sharded_weights_are_exchanged_for_each_microbatch() -> None:
    """On a slow link both microbatches wait for weights twice, and for gradients of twice the bytes once."""
    slow = replace(MACHINE, node=Link(1e9, 0))
    gathered = estimated(slow).fullest.weights * 7 / 8 / 1e9
    waited = estimated(slow, **SHARDED).pipeline_seconds
    assert waited == pytest.approx(2 * (2 + 2) * gathered, rel=0.1)
    assert waited > estimated(slow).pipeline_seconds + 4 * gathered


def test_hidden_traffic_costs_its_share_without_a_pipeline() -> None:
    half = replace(MACHINE, sustained={"overlap": 0.5})
    gathered = estimated().fullest.weights * 7 / 8 / 1e12
    more = estimated(half).step_seconds - estimated().step_seconds
    # Gradients have twice the bytes of weights; what is never hidden counts as before.
    assert 0.5 * gathered < more <= 0.5 * 3 * gathered
    assert estimated(half, **SHARDED).step_seconds - estimated(**SHARDED).step_seconds == pytest.approx(
        2 * 0.5 * 4 * gathered, rel=0.02
    )
    pipelined = {"pipeline_model_parallel_size": 2}
    assert estimated(half, **pipelined) == estimated(**pipelined)


def test_activations_on_the_host_take_no_memory_and_no_time_where_the_link_is_fast() -> None:
    fast = replace(MACHINE, host=Link(1e12, 0))
    whole, copied = estimated(fast), estimated(fast, cpu_offloading_num_layers=6)
    assert copied.step_seconds == whole.step_seconds
    layer = whole.fullest.activations - estimated(num_layers=7).fullest.activations
    assert whole.fullest.activations - copied.fullest.activations == pytest.approx(5 * layer)


def test_layers_wait_for_copies_on_a_slow_link() -> None:
    """Forward and backward of both microbatches take as long as the copies of six layers."""
    slow = replace(MACHINE, host=Link(1e10, 0))
    layer = estimated().fullest.activations - estimated(num_layers=7).fullest.activations
    waited = estimated(slow, cpu_offloading_num_layers=6).pipeline_seconds
    assert waited == pytest.approx(2 * 2 * 6 * layer / 1e10, rel=0.1)


def test_a_system_without_a_host_has_no_place_for_activations() -> None:
    with pytest.raises(ValueError, match=r"^system test describes no host, .*: give it host$"):
        estimated(cpu_offloading_num_layers=6)


@pytest.mark.parametrize(
    ("recipe", "size"), [("tensorwise", 1), ("delayed", 1), ("blockwise", 1), ("mxfp8", 2)]
)
def test_layers_that_exist_in_fp8_alone_are_gathered_in_fp8(recipe: str, size: int) -> None:
    """MXFP8 is gathered in bf16, and so are embedding and output layer in any recipe."""
    machine = replace(
        MACHINE,
        matrix_rates=dict.fromkeys(("bf16", "fp8", "fp8_block"), MACHINE.matrix_rates["bf16"]),
        fp8_recipes=None if size == 1 else ["mxfp8"],
    )
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "overlap_param_gather": False}
    whole, small = (estimated(machine, **fp8, fp8_param_gather=gathers) for gathers in (False, True))
    layers = (estimated(num_layers=8).fullest.weights - estimated(num_layers=4).fullest.weights) * 2
    less = layers / 2 * (2 - size) * 7 / 8 / machine.node.bytes_per_second
    assert whole.step_seconds - small.step_seconds == pytest.approx(less, rel=0.01, abs=1e-9)
