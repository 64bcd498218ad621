"""The formats of numbers in an estimate: what kernels take, and what devices have."""

import shlex
from dataclasses import replace

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe

MODEL = (
    "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --micro-batch-size 1 "
    "--max-position-embeddings 8192 --vocab-size 32000 --attention-dropout 0 --global-batch-size 1"
)
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
BLACKWELL = ("b200", "b300", "gb200", "gb300")


def estimated(flags: str, machine: str = "h100") -> Estimate:
    """Return the estimate of ``MODEL`` with more ``flags`` on one ``machine``."""
    asked = described.read(shlex.split(f"{MODEL} {flags}"), None).counted()
    return estimate_request(asked, system.read(machine), for_world(asked, 1))


def test_no_fused_kernel_takes_fp32() -> None:
    assert estimated("") == estimated("--attention-backend unfused")
    scores = 4 * 32 * 8192**2 * 4  # of all layers, in bytes
    fused, unfused = (estimated(f"--bf16 {flags}") for flags in ("", "--attention-backend unfused"))
    assert unfused.fullest.activations - fused.fullest.activations == pytest.approx(scores / 2, rel=0.2)
    assert estimated("").fullest.activations > scores
    assert estimated("").utilisation < 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--fp8-format hybrid", "--fp8-format with weights in fp32 is not modelled; add --bf16"),
        ("--bf16 --fp8-format e4m3 --transformer-impl local", "no effect on --transformer-impl local"),
        ("--attention-backend flash", "--attention-backend flash has no kernel for fp32; add --bf16"),
    ],
)
def test_what_does_not_go_with_the_precision_is_refused(flags: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        estimated(flags)


@pytest.mark.parametrize("machine", system.shipped())
def test_a_recipe_runs_where_transformer_engine_has_it(machine: str) -> None:
    known = system.read(machine).fp8_recipes
    for recipe in RECIPES:
        flags = f"--bf16 --fp8-format hybrid --fp8-recipe {recipe}"
        if recipe in known:
            assert estimated(flags, machine).step_seconds < estimated("--bf16", machine).step_seconds
            continue
        with pytest.raises(ValueError, match=f"--fp8-recipe {recipe} is not for system {machine}: ") as error:
            estimated(flags, machine)
        assert "add" not in str(error.value)
    assert ("mxfp8" in known) == (machine in BLACKWELL) and bool(known) == (machine != "a100-80g")


def test_a_utilisation_above_1_is_no_estimate() -> None:
    found = estimated("--bf16")
    h100 = system.read("h100")
    found.require_possible(h100)
    replace(found, utilisation=1.2).require_possible(replace(h100, peak_rates={}))
    with pytest.raises(
        ValueError, match=r"would be an MFU of 120\.0%, which no machine has: correct the rates"
    ):
        replace(found, utilisation=1.2).require_possible(h100)


SHARDED_MODEL = {
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


def estimated_sharded(machine: System = MACHINE, **changed: object) -> Estimate:
    job = describe({**SHARDED_MODEL, **changed})
    return estimate_request(job, machine, for_world(asked_of(job), 8))


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [("no_shard", 1, 1), ("optim", 1, 1), ("optim_grads", 1, 8), ("optim_grads_params", 8, 8)],
)
def test_a_strategy_shards_weights_and_gradients(strategy: str, weights: int, gradients: int) -> None:
    plain = estimated_sharded().fullest
    found = estimated_sharded(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy).fullest
    assert found.weights == pytest.approx(plain.weights / weights)
    assert found.gradients == pytest.approx(plain.gradients / gradients)
    assert found.optimizer == plain.optimizer


def test_sharded_weights_are_exchanged_for_each_microbatch() -> None:
    """On a slow link both microbatches wait for weights twice, and for gradients of twice the bytes once."""
    slow = replace(MACHINE, node=Link(1e9, 0))
    gathered = estimated_sharded(slow).fullest.weights * 7 / 8 / 1e9
    waited = estimated_sharded(slow, **SHARDED).pipeline_seconds
    assert waited == pytest.approx(2 * (2 + 2) * gathered, rel=0.1)
    assert waited > estimated_sharded(slow).pipeline_seconds + 4 * gathered


def test_hidden_traffic_costs_its_share_without_a_pipeline() -> None:
    half = replace(MACHINE, sustained={"overlap": 0.5})
    gathered = estimated_sharded().fullest.weights * 7 / 8 / 1e12
    more = estimated_sharded(half).step_seconds - estimated_sharded().step_seconds
    # Gradients have twice the bytes of weights; what is never hidden counts as before.
    assert 0.5 * gathered < more <= 0.5 * 3 * gathered
    assert estimated_sharded(half, **SHARDED).step_seconds - estimated_sharded(
        **SHARDED
    ).step_seconds == pytest.approx(2 * 0.5 * 4 * gathered, rel=0.02)
    pipelined = {"pipeline_model_parallel_size": 2}
    assert estimated_sharded(half, **pipelined) == estimated_sharded(**pipelined)


def test_activations_on_the_host_take_no_memory_and_no_time_where_the_link_is_fast() -> None:
    fast = replace(MACHINE, host=Link(1e12, 0))
    whole, copied = estimated_sharded(fast), estimated_sharded(fast, cpu_offloading_num_layers=6)
    assert copied.step_seconds == whole.step_seconds
    layer = whole.fullest.activations - estimated_sharded(num_layers=7).fullest.activations
    assert whole.fullest.activations - copied.fullest.activations == pytest.approx(5 * layer)


def test_layers_wait_for_copies_on_a_slow_link() -> None:
    """Forward and backward of both microbatches take as long as the copies of six layers."""
    slow = replace(MACHINE, host=Link(1e10, 0))
    layer = estimated_sharded().fullest.activations - estimated_sharded(num_layers=7).fullest.activations
    waited = estimated_sharded(slow, cpu_offloading_num_layers=6).pipeline_seconds
    assert waited == pytest.approx(2 * 2 * 6 * layer / 1e10, rel=0.1)


def test_a_system_without_a_host_has_no_place_for_activations() -> None:
    with pytest.raises(ValueError, match=r"^system test describes no host, .*: give it host$"):
        estimated_sharded(cpu_offloading_num_layers=6)


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
    whole, small = (estimated_sharded(machine, **fp8, fp8_param_gather=gathers) for gathers in (False, True))
    layers = (
        estimated_sharded(num_layers=8).fullest.weights - estimated_sharded(num_layers=4).fullest.weights
    ) * 2
    less = layers / 2 * (2 - size) * 7 / 8 / machine.node.bytes_per_second
    assert whole.step_seconds - small.step_seconds == pytest.approx(less, rel=0.01, abs=1e-9)
