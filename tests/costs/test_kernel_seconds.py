"""Seconds of kernels and collectives on a machine whose figures are easy to reckon with."""

import json
from typing import Any

import pytest

from megatron_pp_ext.costs.kernels import AttentionWork, KernelSeconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.planner.step.model_description import describe

MACHINE = {
    "name": "test", "gpus_per_node": 8, "memory_bytes": 1e9,
    "matrix_rates": {"bf16": [[1, 1, 1, 1e12]], "fp8": [[1, 1, 1, 2e12]]},
    "copy_bytes_per_second": 1e12, "kernel_seconds": 1e-6,
    "node": {"bytes_per_second": 1e11, "latency_seconds": 0},
    "network": {"bytes_per_second": 1e10, "latency_seconds": 0},
}  # fmt: skip
MODEL = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "bf16": True,
    "attention_dropout": 0.0,
}  # fmt: skip


def kernels(machine: dict[str, Any] | None = None, **changed: Any) -> SystemKernelSeconds:
    system = System.from_json(json.dumps({**MACHINE, **(machine or {})}), "here")
    return SystemKernelSeconds(system, describe({**MODEL, **changed}))


def test_what_is_sustained_scales_products_and_copies() -> None:
    plain, slower = kernels(), kernels({"sustained": {"clock": 0.5, "copy": 0.25}})
    assert slower.product(512, 512, 512) == pytest.approx(2 * plain.product(512, 512, 512))
    assert slower.copy(1e6) == pytest.approx(4 * plain.copy(1e6))


def test_a_product_takes_at_least_what_its_operands_do() -> None:
    """One row: 2 x 4096 x 4096 operations, but as many numbers of two bytes."""
    assert kernels().product(1, 4096, 4096) == pytest.approx(2 * (4096 + 4096 * 4096 + 4096) / 1e12)


def test_fp8_products_run_at_its_rate_and_cost_casts() -> None:
    half, quarter = kernels(), kernels(fp8="hybrid")
    assert quarter.product(4096, 4096, 4096) == pytest.approx(half.product(4096, 4096, 4096) / 2)
    # Two bytes are read, and one is written by rows and one by columns.
    assert (half.cast(1e6), quarter.cast(1e6)) == (0, pytest.approx(4e6 / 1e12))
    assert quarter.product(4096, 4096, 4096, is_output=True) == half.product(4096, 4096, 4096)


def test_what_of_a_collective_is_not_hidden() -> None:
    flags = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert kernels(**flags).exposed(1.0, 5.0) == 1.0
    overlapping = kernels(**flags, tp_comm_overlap=True)
    assert overlapping.exposed(1.0, 5.0) == 0.25
    assert overlapping.exposed(5.0, 1.0) == 4.25


def test_experts_of_the_same_node_take_its_links_and_others_the_network() -> None:
    """Of 16 ranks seven others are near and eight far: an eighth of the bytes stays where it is."""
    sent = {"num_experts": 16, "expert_model_parallel_size": 16}
    assert kernels(**sent).shuffle(16e6) == pytest.approx(8e6 / 1e10)
    near = {**sent, "expert_model_parallel_size": 8}
    assert kernels(**near).shuffle(16e6) == pytest.approx(14e6 / 1e11)


def test_a_dispatcher_that_sends_a_token_once_to_a_node() -> None:
    """Eight experts of a token are on both of two nodes but for one in 128, and on five of eight ranks."""
    sent = {"num_experts": 16, "moe_router_topk": 8, "moe_token_dispatcher_type": "flex"}
    sent |= {"moe_flex_dispatcher_backend": "hybridep"}
    far = kernels(**sent, expert_model_parallel_size=16).shuffle(8e6) - 37e-6
    assert far == pytest.approx(1e6 * 2 * (1 - 0.5**8) / 2 / 1e10)
    near = kernels(**sent, expert_model_parallel_size=8).shuffle(8e6) - 37e-6
    assert near == pytest.approx(1e6 * (8 * (1 - (7 / 8) ** 8) * 7 / 8 + 1.6) / 1e11)
    deepep = kernels(**{**sent, "moe_flex_dispatcher_backend": "deepep"}, expert_model_parallel_size=8)
    assert deepep.shuffle(8e6) - 37e-6 == pytest.approx(near + 1e-4)


def test_groups_of_experts_limit_the_ranks_that_a_token_reaches() -> None:
    """Four of eight groups, each on a rank of its own; of 16 ranks each group has two, of four ranks two."""
    routed = {"num_experts": 32, "moe_router_topk": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 4}
    found = kernels(**routed)
    assert found.reached(8) == 4
    assert found.reached(16) == pytest.approx(4 * 2 * (1 - 0.5**2))
    assert found.reached(4) == pytest.approx(4 * (1 - 0.75**4))
    assert kernels(num_experts=32, moe_router_topk=8).reached(8) == pytest.approx(8 * (1 - (7 / 8) ** 8))


def test_tokens_are_gathered_among_the_ranks_of_an_expert() -> None:
    """With all of a weight on one rank nothing is gathered, however many tensor-parallel ranks there are."""
    parallel = {"num_experts": 8, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert kernels(**parallel, expert_tensor_parallel_size=1).gather_for_experts(4e6) == 0
    assert kernels(**parallel).gather_for_experts(4e6) == kernels(**parallel).gather(4e6) > 0


def test_collectives_in_a_step_are_slower_than_alone() -> None:
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    alone, shared = kernels(**parallel), kernels({"sustained": {"group": 0.5}}, **parallel)
    assert shared.gather(4e6) == pytest.approx(2 * alone.gather(4e6))


@pytest.mark.parametrize(
    ("graphs", "layers", "experts"),
    [("none", 1e-5, 1e-5), ("transformer_engine", 0, 1e-5), ("local", 0, 1e-5), ("full_iteration", 0, 0)],
)
def test_graphs_launch_layers_but_for_experts(graphs: str, layers: float, experts: float) -> None:
    found = kernels(cuda_graph_impl=graphs)
    assert found.launched(Part(), 10).forward_seconds == pytest.approx(layers)
    assert found.launched(Part(), 10, has_routed=True).forward_seconds == pytest.approx(experts)


def test_fp4_products_run_at_its_rate_and_cost_casts() -> None:
    """Two bytes are read twice, and nine sixteenths of a byte are written by rows and by columns."""
    rates = {"bf16": [[1, 1, 1, 1e12]], "fp4": [[1, 1, 1, 4e12]]}
    half, four = kernels({"matrix_rates": rates}), kernels({"matrix_rates": rates}, fp4="e2m1")
    assert four.product(4096, 4096, 4096) == pytest.approx(half.product(4096, 4096, 4096) / 4)
    assert four.cast(1e6) == pytest.approx((4 + 2 * 9 / 16) * 1e6 / 1e12)
    with pytest.raises(
        ValueError, match="--fp4-format is not for system test: Transformer Engine has it from"
    ):
        kernels(fp4="e2m1")


@pytest.mark.parametrize(("dispatcher", "processors"), [("flex", 20), ("alltoall", 32)])
def test_an_exchange_takes_processors(dispatcher: str, processors: int) -> None:
    flags = {"num_experts": 8, "moe_token_dispatcher_type": dispatcher}
    assert kernels({"processors": 100}, **flags).left_beside_exchange == pytest.approx(1 - processors / 100)
    assert kernels(**flags).left_beside_exchange == 1
    # Tiles that are divided beforehand wait for a second round, however few processors are missing.
    persistent = {"processors": 100, "persistent_products": True}
    assert kernels(persistent, **flags).left_beside_exchange == 0.5


def test_no_action_is_shorter_than_its_launches() -> None:
    part = Part(forward_seconds=1e-3, input_gradient_seconds=1e-6, weight_gradient_seconds=1e-6)
    found = kernels().launched(part, 10)
    assert found.forward_seconds == 1e-3
    assert found.input_gradient_seconds == pytest.approx(15e-6)
    assert found.weight_gradient_seconds == pytest.approx(5e-6)


def test_fused_attention_runs_at_the_rate_of_its_heads_and_keys() -> None:
    """A query sees half of the keys, or a window, and takes as long as some keys more would.

    Where windows begin inside the sequence, as those of half of the queries do, they cut a tile of 128.
    """
    machine = kernels({"attention_rates": [[64, 1e12, 100], [128, 2e12, 50]]})
    for width, rate in ((64, 1e12 * 512 / 612), (96, 1.5e12 * 512 / 587), (256, 2e12 * 512 / 562)):
        forward, backward = machine.attention(AttentionWork(2e9, 0, True, 1024, width))
        assert forward == pytest.approx(1e9 / rate)
        assert backward == pytest.approx(2.5e9 / rate)
    windowed, _ = machine.attention(AttentionWork(2e9, 0, True, 1024, 64, seen=0.25))
    assert windowed == pytest.approx(0.5e9 / (1e12 * 256 / (356 + 64)))


def test_the_backward_of_fused_attention_has_rates_of_its_own() -> None:
    rates = {"attention_rates": [[64, 1e12, 100]], "attention_backward_rates": [[64, 5e11, 512]]}
    alone, both = kernels({"attention_rates": rates["attention_rates"]}), kernels(rates)
    forward, backward = both.attention(AttentionWork(2e9, 0, True, 1024, 64))
    assert forward == alone.attention(AttentionWork(2e9, 0, True, 1024, 64))[0]
    assert backward == pytest.approx(2.5e9 / 5e11 * 2)


def test_fused_attention_makes_random_numbers_for_dropout() -> None:
    """As many in either pass as there are scores; with heads of 128 they take 1.5 times the forward."""
    for width in (64, 128):
        plain, dropped = (
            kernels(attention_dropout=p).attention(AttentionWork(2e9, 0, True, 64, width)) for p in (0, 0.1)
        )
        more = 1.5 * plain[0] * 128 / width
        assert dropped == pytest.approx([seconds + more for seconds in plain])


def test_attention_leaves_processors_idle_at_its_end() -> None:
    """Three tiles of 128 queries on two processors take a wave and a half, and 0.8 of one more."""
    machine = kernels({"attention_rates": [[128, 1e12, 64]], "processors": 2})
    forward, _ = machine.attention(AttentionWork(4 * 384 * 384 * 128, 0, True, 384, 128))
    assert forward == pytest.approx(2 * 384 * (192 + 64) * 2 * 128 / 1e12 * 2.3 / 1.5)


def test_sums_that_a_product_does_not_hide_are_read_and_written_behind_it() -> None:
    """They are in fp32, and reach what the memory does, of which small kernels sustain less."""
    shared = {"sustained": {"copy": 0.5}}
    hiding, exposing = (kernels({**shared, "exposed_sums": share}) for share in (0, 0.5))
    plain, hidden, exposed = (
        machine.product(512, 512, 512, adds=adds)
        for machine, adds in ((hiding, False), (hiding, True), (exposing, True))
    )
    assert hidden == plain
    assert exposed - plain == pytest.approx(0.5 * 8 * 512 * 512 / 1e12)


def test_products_of_a_group_share_their_waves() -> None:
    """Two products of one tile each take two processors as long as one product takes one."""
    machine = kernels({"processors": 2, "matrix_rates": {"bf16": [[4096, 4096, 4096, 1e11]]}})
    assert machine.product(64, 64, 512, groups=2) == pytest.approx(machine.product(64, 64, 512))


def test_numbers_that_ranks_gather_are_cast_by_parts() -> None:
    """A quarter is read and written by rows, and all is read once more and written by columns."""
    cast = kernels(fp8="hybrid").cast(4e6, ranks=4)
    assert cast == pytest.approx((3e6 + 8e6) / 1e12)


@pytest.mark.parametrize(
    ("recipe", "alone", "behind_a_norm"), [("delayed", 4, 1), ("tensorwise", 6, 4), ("blockwise", 4, 4)]
)
def test_scales_tell_what_a_cast_reads(recipe: str, alone: int, behind_a_norm: int) -> None:
    """Scales of the tensor itself take a pass over it, but for a norm's.  Where they are known before, a norm
    writes a byte, not two.
    """
    made = kernels(fp8="hybrid", fp8_recipe=recipe)
    assert made.cast(1e6) == pytest.approx(alone * 1e6 / 1e12)
    assert made.cast(1e6, is_normed=True) == pytest.approx(behind_a_norm * 1e6 / 1e12)


@pytest.mark.parametrize(
    ("recipe", "alone", "behind_a_norm", "gathered"),
    [("delayed", 3, -1, 3 / 4), ("tensorwise", 5, 3, 5 / 4), ("mxfp8", 4, 4, 3 / 4 + 2)],
)
def test_products_of_any_layout_need_no_operand_by_columns(
    recipe: str, alone: int, behind_a_norm: int, gathered: float
) -> None:
    """So it is where MXFP8 runs, whose scales of blocks differ by rows and by columns, however."""
    made = kernels({"fp8_recipes": ["delayed", "tensorwise", "mxfp8"]}, fp8="hybrid", fp8_recipe=recipe)
    assert made.cast(1e6) == pytest.approx(alone * 1e6 / 1e12)
    assert made.cast(1e6, is_normed=True) == pytest.approx(behind_a_norm * 1e6 / 1e12)
    assert made.cast(1e6, ranks=4) == pytest.approx(gathered * 1e6 / 1e12)


def test_casts_may_reach_another_share_of_the_memorys_rate() -> None:
    slow, fast = (
        kernels({"sustained": shares}, fp8="hybrid") for shares in ({"copy": 0.4}, {"copy": 0.4, "cast": 0.8})
    )
    assert slow.cast(1e6) == pytest.approx(2 * fast.cast(1e6))
    assert slow.copy(1e6) == fast.copy(1e6)


def test_products_in_mxfp8_take_longer() -> None:
    machine = {"fp8_recipes": ["tensorwise", "mxfp8"]}
    plain, scaled = (kernels(machine, fp8="e4m3", fp8_recipe=recipe) for recipe in ("tensorwise", "mxfp8"))
    assert scaled.product(512, 512, 512) == pytest.approx(1.05 * plain.product(512, 512, 512))
    assert scaled.product(512, 512, 512, is_output=True) == plain.product(512, 512, 512, is_output=True)


def test_scales_of_blocks_have_products_of_their_own() -> None:
    flags = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    with pytest.raises(ValueError, match="no matrix rate for fp8_block"):
        kernels(**flags).product(64, 64, 64)
    rates = {**MACHINE["matrix_rates"], "fp8_block": [[1, 1, 1, 1.5e12]]}
    found = kernels({"matrix_rates": rates}, **flags).product(4096, 4096, 4096)
    assert found == pytest.approx(2 * 4096**3 / 1.5e12)


def test_attention_that_is_not_fused_may_be_in_fp32() -> None:
    machine = kernels({"matrix_rates": {**MACHINE["matrix_rates"], "fp32": [[1, 1, 1, 1e11]]}})
    half, wide = (
        machine.attention(AttentionWork(2e9, 0, False, 64, is_wide=is_wide)) for is_wide in (False, True)
    )
    assert wide == pytest.approx([10 * seconds for seconds in half])


def test_ratios_count_what_masks_leave() -> None:
    whole, windowed = (
        KernelSeconds().attention(AttentionWork(2e9, 0, True, 64, seen=seen))[0] for seen in (0.5, 0.125)
    )
    assert windowed == pytest.approx(whole / 4)


def test_a_delta_rule_runs_at_a_share_of_the_rate_of_products() -> None:
    forward, backward = kernels().delta_rule(1e9)
    assert forward == pytest.approx(1e-3 / 0.12)
    assert backward == pytest.approx(3 * forward)
