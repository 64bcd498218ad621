"""What messages take in an estimate: as many as the schedule lets wait, each of the size that travels."""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.planner.step.estimate import StepModel
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement, linear

MODEL = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "micro_batch_size": 3,
    "vocab_size": 32000, "bf16": True,
}  # fmt: skip
H100 = system.read("h100")
HIDDEN = 2 * 256 * 3 * 512


def work(placement: Placement, **changed: object) -> Workload:
    return Workload(describe({**MODEL, **changed}), H100, placement, 1)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, HIDDEN),
        ({"bf16": False}, 2 * HIDDEN),
        ({"tensor_model_parallel_size": 2}, HIDDEN),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, HIDDEN / 2),
        ({"context_parallel_size": 4}, HIDDEN / 4),
        ({"fp32_residual_connection": True}, 2 * HIDDEN),
        ({"fp32_residual_connection": True, "bf16": False}, 2 * HIDDEN),
    ],
)
def test_the_size_of_a_message(changed: dict, size: float) -> None:
    assert work(linear(4), **changed).costs.message == size


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half", "breadth-first"])
def test_a_rank_s_messages(name: str) -> None:
    schedule = catalog.build(name, 4, 8)
    program_ = program(name, 4, 8, schedule.placement.chunks)
    found = StepModel(work(schedule.placement), program_, name, 8).estimate()
    assert [rank.messages / HIDDEN for rank in found.ranks] == list(program_.peak_messages)
    for rank in found.ranks:
        parts = dict(rank.components())
        assert rank.total == pytest.approx(sum(parts.values()))
        assert rank.margin == pytest.approx(0.05 * (rank.activations + rank.messages + rank.loss))


def test_one_rank_has_none() -> None:
    (rank,) = StepModel(work(linear(1)), program("none", 1, 4, 1), "none", 4).memory()
    assert rank.messages == 0


def test_without_a_flush_sends_of_earlier_updates_count() -> None:
    """An update of one microbatch sends one message a rank, but the pipeline goes on."""
    made = work(linear(4), pipeline_model_parallel_size=4)
    ranks = StepModel(made, program("pipedream", 4, 1, 1), "pipedream", 1).memory()
    assert [rank.messages / HIDDEN - SENDS_AHEAD - 1 for rank in ranks] == [1, 2, 2, 2]
