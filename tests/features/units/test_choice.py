"""The length of slices: how it is chosen, what it brings, and searches among lengths."""

import shlex
from collections.abc import Iterable

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.job import options, pipeline
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.configurations import record
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory
from megatron_pp_ext.planner.search.result import Compiles
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.schedule.entry import FLEX
from tests.planner.test_configuration_search import (
    A100,
    estimated,
    everything,
    searched_as_exhaustively,
    space,
)
from tests.support.tiers import first

SCHEDULES = "1f1b", "v-half"
SIZES = {"seq_length": 8192, "schedules": SCHEDULES, "fixed": ("micro_batch_size",), "micro_batch_size": 1}
MODEL = shlex.split(
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --vocab-size 32000 --bf16 "
    "--max-position-embeddings 8192"
)


@pytest.mark.parametrize("tokens", first(1, ["auto", 2048]))
def test_the_best_are_those_of_all(tokens: int | str) -> None:
    searched_as_exhaustively(space(pipeline_slice_tokens=tokens, **SIZES), 60e9, 4)


def test_what_is_tried() -> None:
    """A number leaves out whole sequences, auto has them too; slices need a pipeline."""
    of_number, of_auto = (
        list(everything(space(pipeline_slice_tokens=tokens, **SIZES))) for tokens in (2048, "auto")
    )

    def sizes_of(candidates: Iterable[Candidate]) -> set[int | None]:
        return {option and option.tokens for option in (one.option(Slices) for one in candidates)}

    assert sizes_of(of_number) == {2048}
    assert sizes_of(of_auto) == {None, *(8192 >> step for step in range(1, 5))}
    for one in (*of_number, *of_auto):
        if one.option(Slices):
            assert one.pipeline > 1


def test_bounds_are_below_every_estimate() -> None:
    where = space(pipeline_slice_tokens="auto", **SIZES)
    for candidate in everything(where):
        if candidate.option(Slices):
            work, found = estimated(candidate, where)
            assert min(bounds(work, candidate.microbatches)) <= found.step_seconds
            assert least_memory(work, candidate.microbatches, 0.05).total <= found.fullest.total


@pytest.mark.parametrize("compiles", [Compiles.NEVER, Compiles.ONLY])
def test_a_command_has_the_slices_that_were_found(compiles: Compiles) -> None:
    where = space(pipeline_slice_tokens=2048, **SIZES)
    best = Search(where, A100, 60e9, compiles=compiles, top=1).run().best[0]
    assert (best.candidate.schedule == FLEX) == (compiles is Compiles.ONLY)
    assert best.estimate.fullest.total <= 60e9
    assert record(best.candidate)["slice_tokens"] == 2048
    words = best.candidate.flags([*MODEL, "--pipeline-slice-tokens", "auto"])
    assert words.count("--pipeline-slice-tokens") == 1
    asked = described.read(words, None).counted()
    again = estimate_request(asked, A100, for_world(asked, 4))
    assert again.step_seconds == pytest.approx(best.estimate.step_seconds, rel=1e-3)


SLICED_MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 32768 --micro-batch-size 1 "
    "--max-position-embeddings 32768 --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--pipeline-model-parallel-size 4 --global-batch-size 4"
)


def asked(flags: str) -> RequestedJob:
    """Return the job of ``MODEL`` with more ``flags``."""
    return described.read(shlex.split(f"{SLICED_MODEL} {flags}"), None).counted()


def estimated_in_slices(flags: str) -> Estimate:
    """Return the estimate of ``MODEL`` with more ``flags`` on 4 H100."""
    job = asked(flags)
    return estimate_request(job, system.read("h100"), for_world(job, 4))


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_slices_make_steps_shorter_and_keep_less(name: str) -> None:
    whole = estimated_in_slices(f"--pipeline-schedule {name}")
    sliced = estimated_in_slices(f"--pipeline-schedule {name} --pipeline-slice-tokens 4096")
    assert sliced.step_seconds < whole.step_seconds
    assert sliced.fullest.activations < 0.7 * whole.fullest.activations
    assert sliced.fullest.messages < 0.5 * whole.fullest.messages
    assert sliced.tokens_per_second * sliced.step_seconds == pytest.approx(
        whole.tokens_per_second * whole.step_seconds
    )


def test_slices_as_long_as_the_sequence_change_nothing() -> None:
    whole = estimated_in_slices("--pipeline-schedule 1f1b")
    assert estimated_in_slices("--pipeline-schedule 1f1b --pipeline-slice-tokens 32768") == whole


def test_small_slices_cost_the_rate_of_small_products() -> None:
    steps = [
        estimated_in_slices(f"--pipeline-schedule 1f1b --pipeline-slice-tokens {tokens}").step_seconds
        for tokens in (32, 1024)
    ]
    assert steps[0] > steps[1]


def chosen(given: RequestedJob) -> int:
    """Return the tokens that are chosen for a job on as few ranks as it takes."""
    found = options.chosen(given, lambda one: pipeline.read(one, 1), lambda: 32000)
    assert found.keys() == {"pipeline_slice_tokens"}
    return int(found["pipeline_slice_tokens"])


LENGTHS = [32768 >> step for step in range(8)]


@pytest.mark.parametrize(
    "name",
    ["1f1b", "v-half", pytest.param("flex --pipeline-memory-limit 0.5", marks=pytest.mark.wide)],
)
def test_auto_has_the_shortest_step_of_the_estimates(name: str) -> None:
    given = asked(f"--pipeline-schedule {name} --pipeline-slice-tokens auto")
    tokens = chosen(given)
    steps = {
        tokens: estimated_in_slices(
            f"--pipeline-schedule {name} --pipeline-slice-tokens {tokens}"
        ).step_seconds
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
    assert tokens < 24588 and tokens % 4 == 0


def test_a_number_stays() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens 4096")
    assert not options.chosen(given, lambda one: pipeline.read(one, 1), lambda: 32000)


def test_what_is_refused_beside_slices_is_refused_beside_auto() -> None:
    given = asked("--pipeline-schedule v-half --pipeline-slice-tokens auto --pipeline-offload auto")
    with pytest.raises(ValueError, match="--pipeline-slice-tokens auto does not support --pipeline-offload"):
        chosen(given)


def test_a_limit_that_no_length_keeps() -> None:
    """All slices of a sequence are kept at one time, a quarter of 1F1B's peak on four ranks."""
    given = asked("--pipeline-schedule flex --pipeline-memory-limit 0.2 --pipeline-slice-tokens auto")
    with pytest.raises(ValueError, match="infeasible"):
        chosen(given)
