"""What optimizers keep and compute, against sums by hand."""

from dataclasses import replace

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.mlp import experts, mlp
from megatron_pp_ext.costs.optimizers import Sharing, model_state, update_seconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.planner.step.model_description import describe

H, F = 1024, 4096
MODEL = {
    "num_layers": 2, "hidden_size": H, "ffn_hidden_size": F, "num_attention_heads": 8, "seq_length": 512,
    "micro_batch_size": 1, "vocab_size": 1024, "bf16": True, "add_bias_linear": False,
    "normalization": "RMSNorm",
}  # fmt: skip
H100 = system.read("h100")
MATRICES, NORM = 2 * H * F, H
ITERATION = 2 * (4 * H**2 * F + 2 * H**3)
"""The operations with which an MLP's two matrices are made orthogonal once."""


def state(dense=1, **changed):
    job = describe({**MODEL, **changed})
    return job, model_state(job, mlp(LayerCosts(job)), Sharing(dense=dense, expert=1))


@pytest.mark.parametrize(
    ("changed", "matrix", "other"),
    [
        ({}, 8, 8),
        ({"optimizer": "sgd"}, 4, 4),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 0, 0),
        ({"optimizer": "lion"}, 4, 8),
        ({"optimizer": "muon"}, 4, 8),
        ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, 4, 4),
        ({"optimizer": "adaptive_muon"}, 8, 8),
    ],
)
def test_moments_of_matrices_and_of_other_weights(changed, matrix, other):
    """Beside the fp32 copy of each weight; traffic is 22 bytes, and twice the moments."""
    _, found = state(**changed)
    moments = matrix * MATRICES + other * NORM
    assert found.optimizer == pytest.approx(moments + 4 * (MATRICES + NORM))
    assert found.update.traffic == pytest.approx(22 * (MATRICES + NORM) + 2 * moments)


@pytest.mark.parametrize("how", [{"optimizer": "dist_muon"}, {"use_distributed_optimizer": True}])
def test_shared_state(how):
    _, found = state(dense=4, **how)
    assert found.optimizer == pytest.approx(state(**how)[1].optimizer / 4)


@pytest.mark.parametrize(("ranks", "operations"), [(1, ITERATION), (2, ITERATION / 2), (64, ITERATION / 2)])
def test_no_rank_has_less_to_do_for_muon_than_the_largest_matrix(ranks, operations):
    _, found = state(dense=ranks, optimizer="muon", use_distributed_optimizer=True)
    assert found.update.orthogonal == pytest.approx(operations)
    assert state(dense=ranks)[1].update.orthogonal == 0


def test_experts_are_made_orthogonal_one_by_one():
    """Each has a matrix of half the shorter side; ranks that have the same ones share them."""
    job = describe({**MODEL, "num_experts": 8, "moe_ffn_hidden_size": 512, "optimizer": "dist_muon"})
    part = experts(LayerCosts(job))
    assert part.matrices.expert_operations == 8 * 2 * (4 * 512**2 * H + 2 * 512**3)
    router = 4 * 8**2 * H + 2 * 8**3
    assert part.matrices.operations == router
    shared = model_state(job, part, Sharing(dense=4, expert=2)).update
    assert shared.orthogonal == router / 4 + part.matrices.expert_operations / 2


def test_an_iteration_runs_at_the_rate_of_a_square_product():
    """Six sides cubed are the operations of one with a square matrix."""
    job, found = state(optimizer="muon", muon_num_ns_steps=7)
    side = (ITERATION / 2 / 6) ** (1 / 3)
    each = ITERATION / H100.rate("bf16", side, side, side)
    copying = (found.update.traffic + 1000) / H100.copy_bytes_per_second
    assert update_seconds(job, H100, found.update, 1000) == pytest.approx(7 * each + copying)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_an_offloaded_part_is_the_host_s(part):
    """4 bytes down, 4 up, and 28 bytes of the host's memory for each of its weights."""
    _, plain = state()
    job, found = state(optimizer_cpu_offload=True, optimizer_offload_fraction=part)
    weights = part * (MATRICES + NORM)
    assert found.optimizer == pytest.approx((1 - part) * plain.optimizer)
    assert found.update.offloaded == pytest.approx(weights)
    copy = H100.host.latency_seconds + 4 * weights / H100.host.bytes_per_second
    computing = 28 * weights / H100.host_memory_bytes_per_second
    device = found.update.traffic / H100.copy_bytes_per_second
    assert update_seconds(job, H100, found.update, 0.0) == pytest.approx(device + 2 * copy + computing)
    together = job.changed(overlap_cpu_optimizer_d2h_h2d=True)
    assert update_seconds(together, H100, found.update, 0.0) == pytest.approx(device + max(copy, computing))


def test_a_system_without_a_host_is_named():
    small = replace(H100, name="mine", host=None)
    job, found = state(optimizer_cpu_offload=True)
    with pytest.raises(ValueError, match="system mine describes no host, which --optimizer-cpu-offload"):
        update_seconds(job, small, found.update, 0.0)


def test_all_shipped_systems_have_a_host():
    for name in system.shipped():
        found = system.read(name)
        assert found.host and found.host_memory_bytes_per_second
        assert {"host", "host_memory_bytes_per_second"} <= set(found.sources)


def test_a_part_without_weights_has_nothing_to_update():
    job = describe(MODEL)
    assert model_state(job, Part(), Sharing(1, 1)).optimizer == 0
