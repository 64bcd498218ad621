"""The choice of the length of slices."""

import pytest

from megatron_pp_ext.features.slices.costs import choice
from tests.features.slices.test_estimates import asked, estimated

LENGTHS = [32768 >> step for step in range(8)]


@pytest.mark.parametrize("name", ["1f1b", "v-half", "flex --pipeline-memory-limit 0.5"])
def test_auto_has_the_shortest_step_of_the_estimates(name: str) -> None:
    given = asked(f"--pipeline-schedule {name} --pipeline-slice-tokens auto")
    tokens = choice.settled(given, 1, 32000).pipeline.pipeline_slice_tokens
    steps = {
        tokens: estimated(f"--pipeline-schedule {name} --pipeline-slice-tokens {tokens}").step_seconds
        for tokens in LENGTHS
    }
    assert tokens != 32768
    assert steps[tokens] == pytest.approx(min(steps.values()), rel=1e-3)


def test_short_sequences_stay_whole() -> None:
    given = asked("--pipeline-schedule v-half --seq-length 512 --pipeline-slice-tokens auto")
    assert choice.settled(given, 1, 32000).pipeline.pipeline_slice_tokens == 512


def test_slices_are_shared_out_over_tensor_parallel_ranks() -> None:
    given = asked(
        "--pipeline-schedule v-half --seq-length 24588 --pipeline-slice-tokens auto "
        "--tensor-model-parallel-size 4 --sequence-parallel"
    )
    tokens = choice.settled(given, 1, 32000).pipeline.pipeline_slice_tokens
    assert isinstance(tokens, int) and 24588 % tokens == 0 and tokens % 4 == 0


def test_a_number_stays() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens 4096")
    assert choice.settled(given, 1, 32000) is given


def test_what_is_refused_beside_slices_is_refused_beside_auto() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens auto --context-parallel-size 2")
    with pytest.raises(ValueError, match="--pipeline-slice-tokens auto does not support --context-parallel"):
        choice.settled(given, 1, 32000)


def test_a_limit_that_no_length_keeps() -> None:
    """All slices of a sequence are kept at one time, a quarter of 1F1B's peak on four ranks."""
    given = asked("--pipeline-schedule flex --pipeline-memory-limit 0.2 --pipeline-slice-tokens auto")
    with pytest.raises(ValueError, match="infeasible"):
        choice.settled(given, 1, 32000)
