"""Estimates of steps in slices."""

import shlex

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 32768 --micro-batch-size 1 "
    "--max-position-embeddings 32768 --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--pipeline-model-parallel-size 4 --global-batch-size 4"
)


def asked(flags: str) -> RequestedJob:
    """Return the job of ``MODEL`` with more ``flags``."""
    return described.read(shlex.split(f"{MODEL} {flags}"), None).counted()


def estimated(flags: str) -> Estimate:
    """Return the estimate of ``MODEL`` with more ``flags`` on 4 H100."""
    job = asked(flags)
    return estimate_request(job, system.read("h100"), for_world(job, 4))


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_slices_make_steps_shorter_and_keep_less(name: str) -> None:
    whole = estimated(f"--pipeline-schedule {name}")
    sliced = estimated(f"--pipeline-schedule {name} --pipeline-slice-tokens 4096")
    assert sliced.step_seconds < whole.step_seconds
    assert sliced.fullest.activations < 0.6 * whole.fullest.activations
    assert sliced.fullest.messages < 0.5 * whole.fullest.messages
    assert sliced.tokens_per_second * sliced.step_seconds == pytest.approx(
        whole.tokens_per_second * whole.step_seconds
    )


def test_slices_as_long_as_the_sequence_change_nothing() -> None:
    whole = estimated("--pipeline-schedule 1f1b")
    assert estimated("--pipeline-schedule 1f1b --pipeline-slice-tokens 32768") == whole


def test_small_slices_cost_the_rate_of_small_products() -> None:
    steps = [
        estimated(f"--pipeline-schedule 1f1b --pipeline-slice-tokens {tokens}").step_seconds
        for tokens in (32, 1024)
    ]
    assert steps[0] > steps[1]
