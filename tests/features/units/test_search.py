"""Searches among slices find what trying all of them finds, and their commands have what was found."""

import shlex

import pytest

from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.configurations import record
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory
from megatron_pp_ext.planner.search.result import Compiles
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.schedule.entry import FLEX
from tests.planner.test_configuration_search import (
    A100,
    estimated,
    everything,
    searched_as_exhaustively,
    space,
)

SCHEDULES = "1f1b", "v-half"
SIZES = {"seq_length": 8192, "schedules": SCHEDULES, "fixed": ("micro_batch_size",), "micro_batch_size": 1}
MODEL = shlex.split(
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --vocab-size 32000 --bf16 "
    "--max-position-embeddings 8192"
)


@pytest.mark.parametrize("tokens", [2048, "auto"])
def test_the_best_are_those_of_all(tokens: int | str) -> None:
    searched_as_exhaustively(space(pipeline_slice_tokens=tokens, **SIZES), 60e9, 4)


def test_what_is_tried() -> None:
    """A number leaves out whole sequences, auto has them too; slices have no context parallelism."""
    of_number, of_auto = (
        list(everything(space(pipeline_slice_tokens=tokens, **SIZES))) for tokens in (2048, "auto")
    )
    assert {one.option(Slices) for one in of_number} == {Slices(2048, 4)}
    found = {one.option(Slices) for one in of_auto}
    assert found == {None, *(Slices(8192 >> step, 1 << step) for step in range(1, 5))}
    for one in (*of_number, *of_auto):
        if one.option(Slices):
            assert one.pipeline > 1 and one.context == 1


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
