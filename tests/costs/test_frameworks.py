"""What other frameworks and older releases do: they are told by arguments, and absent ones are today's."""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import OF_STAGES
from megatron_pp_ext.schedule.placement import linear

MODEL = {
    "num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 512, "micro_batch_size": 2,
    "vocab_size": 32000, "tensor_model_parallel_size": 8, "fp16": True,
}  # fmt: skip
HIDDEN = 2 * 512 * 2 * 1024
A100 = system.read("a100-80g")


def work(changed: dict, **framework: bool | int) -> Workload:
    return Workload(describe({**MODEL, **changed}).changed(**framework), A100, linear(2), 1)


@pytest.mark.parametrize(
    ("changed", "is_divided", "sent", "gathered"),
    [
        ({}, False, HIDDEN, 0),
        ({}, True, HIDDEN / 8, HIDDEN),
        ({"sequence_parallel": True}, True, HIDDEN / 8, 0),
        ({"tensor_model_parallel_size": 1}, True, HIDDEN, 0),
    ],
)
def test_ranks_send_parts_and_gather_them(changed, is_divided, sent, gathered):
    """Each of 8 ranks sends an eighth, and the gathering runs within the node; memory keeps the whole."""
    found = work(changed, scatter_gather_tensors_in_pipeline=is_divided)
    is_near = changed.get("tensor_model_parallel_size") == 1
    link = A100.node if is_near else A100.between_nodes
    hop = link.seconds(sent)
    if gathered:
        hop += A100.gather_seconds(gathered, 8)
    assert found.costs.hop == pytest.approx(hop, rel=1e-12)
    assert found.costs.message == (HIDDEN / 8 if "sequence_parallel" in changed else HIDDEN)


@pytest.mark.parametrize("parallel", [False, True])
def test_sums_of_input_gradients_may_hide_nothing(parallel: bool) -> None:
    """Only without sequence parallelism, whose scattering Megatron has always run behind the product."""
    changed = {"sequence_parallel": parallel}
    today, before = (
        work(changed, async_tensor_model_parallel_allreduce=hides).parts[0] for hides in (True, False)
    )
    assert today.hidden_beside > 0
    assert before.hidden_beside == (today.hidden_beside if parallel else 0)
    assert before.overlapped_in_whole == (today.overlapped_in_whole if parallel else 0)
    assert today.overlapped_in_whole > before.overlapped_in_whole or parallel
    assert before.input_gradient_seconds == today.input_gradient_seconds


@pytest.mark.parametrize(("changed", "moved"), [({}, 2 + 4), ({"fp16": False, "bf16": True}, 2 + 8)])
def test_gradients_are_added_by_themselves(changed: dict, moved: int) -> None:
    """The product's result in half precision is read, and the buffer of gradients is read and written."""
    today, before = (
        work({**changed, "hidden_size": 8192}, gradient_accumulation_fusion=fuses).parts[0]
        for fuses in (True, False)
    )
    weights = 2 * 12 * 8192**2 / 8
    assert before.weight_gradient_seconds - today.weight_gradient_seconds == pytest.approx(
        moved * weights / (A100.copy_bytes_per_second * A100.sustained["copy"]), rel=1e-9
    )
    assert before.forward_seconds == today.forward_seconds


@pytest.mark.parametrize(("recipe", "more"), [("tensorwise", 2.5), ("delayed", 0)])
def test_experts_may_be_cast_slowly(recipe: str, more: float) -> None:
    """With few tokens the device waits for the host, which casts the operands of two products an expert."""
    hopper = system.read("h100")
    job = describe(
        {
            **MODEL,
            "tensor_model_parallel_size": 1,
            "num_experts": 16,
            "moe_ffn_hidden_size": 128,
            "bf16": True,
            "fp16": False,
            "fp8": "hybrid",
            "fp8_recipe": recipe,
            "moe_grouped_gemm": True,
            "seq_length": 64,
        }
    )
    today, before = (
        Workload(job.changed(casts_experts_slowly=is_slow), hopper, linear(2), 1).parts[0]
        for is_slow in (False, True)
    )
    starts = 2 * 2 * 16 * more  # two layers of 16 experts with two products each
    assert before.forward_seconds - today.forward_seconds == pytest.approx(starts * hopper.kernel_seconds)


def test_actions_may_take_starts_of_a_kernel_more() -> None:
    today, before = (work({}, action_starts=starts).costs.stages[0] for starts in (0, 17))
    longer = pytest.approx(17 * A100.kernel_seconds)
    assert [before.seconds(kind) - today.seconds(kind) for kind in OF_STAGES] == [longer] * len(OF_STAGES)
