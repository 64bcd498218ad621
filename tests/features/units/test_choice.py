"""The choice of the length of slices."""

import pytest

from megatron_pp_ext.job import options, pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from tests.features.units.test_estimates import asked, estimated


def chosen(given: RequestedJob) -> int:
    """Return the tokens that are chosen for a job on as few ranks as it takes."""
    found = options.chosen(given, lambda one: pipeline.read(one, 1), lambda: 32000)
    assert found.keys() == {"pipeline_slice_tokens"}
    return int(found["pipeline_slice_tokens"])


LENGTHS = [32768 >> step for step in range(8)]


@pytest.mark.parametrize("name", ["1f1b", "v-half", "flex --pipeline-memory-limit 0.5"])
def test_auto_has_the_shortest_step_of_the_estimates(name: str) -> None:
    given = asked(f"--pipeline-schedule {name} --pipeline-slice-tokens auto")
    tokens = chosen(given)
    steps = {
        tokens: estimated(f"--pipeline-schedule {name} --pipeline-slice-tokens {tokens}").step_seconds
        for tokens in LENGTHS
    }
    assert tokens != 32768
    assert steps[tokens] == pytest.approx(min(steps.values()), rel=1e-3)


def test_short_sequences_stay_whole() -> None:
    given = asked("--pipeline-schedule v-half --seq-length 512 --pipeline-slice-tokens auto")
    assert chosen(given) == 512


def test_slices_are_shared_out_over_tensor_parallel_ranks() -> None:
    given = asked(
        "--pipeline-schedule v-half --seq-length 24588 --pipeline-slice-tokens auto "
        "--tensor-model-parallel-size 4 --sequence-parallel"
    )
    tokens = chosen(given)
    assert 24588 % tokens == 0 and tokens % 4 == 0


def test_a_number_stays() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens 4096")
    assert not options.chosen(given, lambda one: pipeline.read(one, 1), lambda: 32000)


def test_what_is_refused_beside_slices_is_refused_beside_auto() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens auto --context-parallel-size 2")
    with pytest.raises(ValueError, match="--pipeline-slice-tokens auto does not support --context-parallel"):
        chosen(given)


def test_a_limit_that_no_length_keeps() -> None:
    """All slices of a sequence are kept at one time, a quarter of 1F1B's peak on four ranks."""
    given = asked("--pipeline-schedule flex --pipeline-memory-limit 0.2 --pipeline-slice-tokens auto")
    with pytest.raises(ValueError, match="infeasible"):
        chosen(given)
