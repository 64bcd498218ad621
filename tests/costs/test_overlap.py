"""What pairs of forwards and backwards hide of the exchanges of tokens between experts."""

import pytest

from megatron_pp_ext.costs.model_parts import overlapped
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world, permitted
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.programs import placement_of
from megatron_pp_ext.planner.step.workload import Workload

FLAG = "overlap_moe_expert_parallel_comm"
MODEL = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 2048, "micro_batch_size": 1,
    "vocab_size": 1024, "max_position_embeddings": 2048, "bf16": True, "num_experts": 8, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 8, "global_batch_size": 128, "swiglu": True,
}  # fmt: skip
WORLD = 16


def machine(network: float) -> System:
    rates = {"bf16": 4e14, "fp8": 8e14, "fp32": 4e14}
    products = {name: [[64, 64, 64, rate]] for name, rate in rates.items()}
    links = Link(network, 1e-6), Link(network, 1e-6)
    return System("test", 8, 80e9, products, 3e12, *links, peak_rates=rates)


def described(**changed: object) -> Job:
    return describe({**MODEL, "pipeline_model_parallel_size": 2, **changed})


def estimated(name: str, network: float = 1e10, **changed: object) -> Estimate:
    chunks = {} if name == "1f1b" else {"num_virtual_stages_per_pipeline_rank": 2}
    job = described(pipeline_schedule=name, **chunks, **changed)
    return estimate_request(job, machine(network), for_world(asked_of(job), WORLD))


@pytest.mark.parametrize(
    ("exchange", "hidden"),
    [(0.0, 0.0), (1.0, 4.0), (2.0, 2 + 2 + 2 + 2), (5.0, 2 + 5 + 5 + 4), (100.0, 2 + 6 + 12 + 4)],
)
def test_each_exchange_hides_behind_one_computation(exchange: float, hidden: float) -> None:
    """Attention takes 2 and 4, experts compute 6 and 12; each of these hides one exchange or a part of it."""
    attention = Part(forward_seconds=2, input_gradient_seconds=2.5, weight_gradient_seconds=1.5)
    experts = Part(
        forward_seconds=6 + 2 * exchange,
        input_gradient_seconds=7 + 2 * exchange,
        weight_gradient_seconds=5,
        exchanged_seconds=exchange,
    )
    assert overlapped(attention, experts) == hidden
    # With a quarter of the processors elsewhere, a computation is behind by a quarter of the exchange.
    assert overlapped(attention, experts, 0.75) == sum(min(0.75 * exchange, c) for c in (2, 6, 12, 4))


@pytest.mark.parametrize("network", [1e9, 1e10, 1e11])
def test_a_pair_takes_what_is_left(network: float) -> None:
    """The costs' share is that of the stages' sums; a slower network leaves more to hide, up to a half."""
    job = described(**{FLAG: True})
    work = Workload(job, machine(network), placement_of("1f1b", 2, 1), WORLD // 2)
    alone = sum(part.forward_seconds + part.backward_seconds for part in work.parts)
    hidden = sum(part.overlapped_together for part in work.parts)
    assert 0 < hidden < alone / 2
    assert work.costs.pair == pytest.approx(1 - hidden / alone)
    assert Workload(described(), machine(network), work.placement, WORLD // 2).costs.pair == 1
    dense = described(num_experts=None, expert_model_parallel_size=1, **{FLAG: True})
    assert Workload(dense, machine(network), work.placement, WORLD // 2).costs.pair == 1


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe-v"])
def test_estimates_in_pairs(name: str) -> None:
    """Where the exchanges are long, a step in pairs is shorter; few published runs show by how much."""
    alone, pairs = estimated(name), estimated(name, **{FLAG: True})
    assert pairs.step_seconds < 0.95 * alone.step_seconds
    assert not alone.note
    assert "published runs in pairs with a pipeline" in pairs.note
    # DualPipeV has the same forwards, which keep by layer what its backwards free; others begin with more.
    kept = [max(rank.activations for rank in one.ranks) for one in (alone, pairs)]
    assert kept[1] < kept[0] if name == "dualpipe-v" else kept[1] > kept[0]


def test_stocks_own_pairs_are_those_of_interleaved() -> None:
    job = described(num_virtual_stages_per_pipeline_rank=2, **{FLAG: True})
    request = for_world(asked_of(job), WORLD)
    assert request.is_stock
    found = estimate_request(job, machine(1e10), request)
    assert found.step_seconds == estimated("interleaved", **{FLAG: True}).step_seconds


def test_refusals() -> None:
    no_pairs = "v-half: its order has no pairs; choose 1f1b, interleaved or dualpipe-v"
    with pytest.raises(ValueError, match=no_pairs):
        estimated("v-half", **{FLAG: True})
    with pytest.raises(ValueError, match=no_pairs):
        permitted(asked_of(described(**{FLAG: True})), ["v-half", "flex"])
    with pytest.raises(ValueError, match="does not support --moe-token-dispatcher-type allgather"):
        permitted(asked_of(described(moe_token_dispatcher_type="allgather", **{FLAG: True})), ["1f1b"])
    asked = asked_of(described(**{FLAG: True}))
    assert permitted(asked, ["1f1b", "v-half", "dualpipe-v"]) == ["1f1b", "dualpipe-v"]
