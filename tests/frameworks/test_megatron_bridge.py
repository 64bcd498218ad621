"""Megatron-Bridge's own pretrain() under our schedules trains as it does without us, to the last bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_pp_ext.megatron.step_numbers import BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN
from tests.support import frameworks, rounding
from tests.support.training import scalars

frameworks.require("megatron.bridge")

from megatron.bridge.training.gpt_step import forward_step  # noqa: E402

from tests.frameworks.megatron_bridge import Job, Run, assert_same_bits, stock, under  # noqa: E402
from tests.frameworks.packed_sequences import packed_layers, packed_step  # noqa: E402

CASES: dict[str, tuple[str, Job, dict[str, Any]]] = {
    "v-half-tied": ("v-half", Job(chunks=2, is_tied=True), {}),
    "zb-h1-builder-tied": ("zb-h1", Job(builder=True, is_tied=True), {}),
    "v-min-builder": ("v-min", Job(chunks=2, builder=True), {}),
    "1f1b": ("1f1b", Job(), {}),
    "dualpipe-v-builder": ("dualpipe-v", Job(chunks=2, builder=True), {}),
    "interleaved-odd-microbatches": ("interleaved", Job(chunks=2, microbatches=5), {}),
    "flex": ("flex", Job(chunks=2), {"chunks": 2, "memory_limit": 0.75}),
}
"""A schedule, a job, and what else ``install`` is told."""


@pytest.mark.usefixtures("short_searches")
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_stock(case: str) -> None:
    name, job, about = CASES[case]
    ours, theirs = under(name, job, **about), stock(job)
    assert len(ours.losses) == job.steps
    assert theirs.steps == []
    assert_same_bits(ours, theirs)
    if job.chunks == 1:
        assert ours.norms == theirs.norms


def test_data_parallel_with_overlap_and_evaluation() -> None:
    job = Job(chunks=2, world_size=4, is_tied=True, overlaps=True, evaluations=2)
    ours = under("v-half", job)
    assert ours.validation
    assert_same_bits(ours, stock(job))


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("zb-h1", 1)])
def test_weights_gathered_within_the_update(name: str, chunks: int, tmp_path: Path) -> None:
    """A checkpoint stands between the two steps.  With one chunk Bridge alone fails to make its optimizer."""
    job = Job(chunks=chunks, world_size=4, overlaps=True, steps=4)
    early = replace(job, gathers_early=True)
    begun = under(name, replace(early, steps=2, save=str(tmp_path)))
    resumed = under(name, replace(early, load=str(tmp_path)))
    losses, norms = (getattr(begun, name) + getattr(resumed, name) for name in ("losses", "norms"))
    assert_same_bits(replace(resumed, losses=losses, norms=norms), under(name, job))


@pytest.mark.parametrize("first", ["stock", "v-half"])
def test_checkpoints_cross_over(first: str, tmp_path: Path) -> None:
    """Two steps under one and two under the other are four under stock."""
    job = Job(steps=4, is_tied=True)
    starts: dict[str, Callable[..., Run]] = {"stock": stock, "v-half": partial(under, "v-half")}
    second = next(name for name in starts if name != first)
    chunks = {"stock": 1, "v-half": 2}
    begun = starts[first](replace(job, steps=2, chunks=chunks[first], save=str(tmp_path)))
    resumed = starts[second](replace(job, chunks=chunks[second], load=str(tmp_path)))
    losses, norms = (getattr(begun, name) + getattr(resumed, name) for name in ("losses", "norms"))
    assert_same_bits(replace(resumed, losses=losses, norms=norms), stock(job))


@pytest.mark.parametrize(("pipeline_ranks", "microbatches"), [(2, 8), (4, 5)])
def test_experts_in_some_layers(pipeline_ranks: int, microbatches: int) -> None:
    """Which layer has experts goes by its global number, which Bridge asks for before it builds a chunk."""
    job = Job(
        pipeline_ranks,
        chunks=2,
        world_size=pipeline_ranks,
        microbatches=microbatches,
        experts_in=(0, 1, 1, 0, 0, 0, 1, 0),
    )
    ours = under("v-half", job)
    assert any("experts" in name for name in ours.weights)
    assert_same_bits(ours, stock(job))


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("interleaved", 2)])
def test_packed_sequences(name: str, chunks: int) -> None:
    """Every stage gets the lengths of a microbatch's sequences from its own data."""
    job = Job(microbatches=5, step=packed_step, layers=packed_layers)
    theirs = stock(job)
    assert_same_bits(under(name, replace(job, chunks=chunks)), theirs)
    assert theirs.losses != stock(replace(job, step=forward_step, layers=None)).losses


def test_multi_token_prediction() -> None:
    """It uses the output weight twice a microbatch, and a split backward adds the two gradients in turn."""
    job = Job(chunks=2, builder=True, predicts=True)
    ours, theirs = under("v-half", job), stock(job)
    assert any(name.startswith("mtp.") for name in ours.weights)
    assert ours.losses[0] == theirs.losses[0]
    for mine, stocks in zip(ours.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(stocks, rel=rounding.of_losses(updates=2))


def test_numbers_in_its_log(tmp_path: Path) -> None:
    """Its line of an iteration and TensorBoard have them from the second step on; training is the same."""
    job = Job(chunks=2, log=str(tmp_path / "logged"))
    ours = under("v-half", job, costs=[1e-3] * 4)
    without = under("v-half", replace(job, log=str(tmp_path / "without")), has_numbers=False)
    assert_same_bits(ours, without)
    logged, stocks = scalars(tmp_path / "logged"), scalars(tmp_path / "without")
    assert logged.keys() - stocks.keys() == {BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN}
    assert [*logged[BUBBLE]] == [2, 3]
    assert 0 < logged[BUBBLE][3] < 1
    first, *others = ours.printed
    assert "pipeline" not in "".join([first, *without.printed])
    for step, line in enumerate(others, start=2):
        fields = dict(field.split(": ") for field in line.split(" | ") if ": " in field)
        assert fields["pipeline"] == "v-half"
        assert float(fields["bubble"]) == pytest.approx(logged[BUBBLE][step], abs=6e-4)
    assert len(others) == 2
