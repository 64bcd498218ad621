"""Checkpoints cross over between the V, the interleaved and the linear placement, both ways."""

from pathlib import Path

import pytest

from tests.support import rounding
from tests.support.training import train

PIPELINE = ("--pipeline-model-parallel-size", "4")
STEPS = ("--ckpt-format", "torch_dist", "--train-iters", "4", "--clip-grad", "0")
"""Four, without clipping, which would bring the last bits of a norm summed rank by rank into the weights."""
V = (*PIPELINE, "--pipeline-schedule", "v-half")
STOCK = PIPELINE
STOCK_INTERLEAVED = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")
UNTIED = ("--untie-embeddings-and-output-weights",)


def losses(flags: tuple[str, ...]) -> list[float]:
    return train(4, [*flags, *STEPS])[-1].losses


@pytest.fixture(scope="module", params=["tied", "untied"])
def embeddings(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return UNTIED if request.param == "untied" else ()


@pytest.fixture(scope="module")
def uninterrupted(embeddings: tuple[str, ...]) -> list[float]:
    return losses((*STOCK, *embeddings))


def save(folder: Path, flags: tuple[str, ...]) -> None:
    losses((*flags, "--save", str(folder), "--save-interval", "2", "--exit-interval", "2"))


@pytest.fixture(scope="module")
def saved_by_v(tmp_path_factory: pytest.TempPathFactory, embeddings: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("saved-by-v")
    save(folder, (*V, *embeddings))
    return folder


@pytest.fixture(scope="module")
def saved_by_stock(tmp_path_factory: pytest.TempPathFactory, embeddings: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("saved-by-stock")
    save(folder, (*STOCK, *embeddings))
    return folder


@pytest.mark.parametrize("reader", [V, STOCK, STOCK_INTERLEAVED], ids=["v-half", "1f1b", "interleaved"])
def test_v_checkpoint_goes_on(saved_by_v: Path, embeddings, uninterrupted, reader) -> None:
    assert losses((*reader, *embeddings, "--load", str(saved_by_v))) == uninterrupted[2:]


def test_stock_checkpoint_goes_on_under_v(saved_by_stock: Path, embeddings, uninterrupted) -> None:
    assert losses((*V, *embeddings, "--load", str(saved_by_stock))) == uninterrupted[2:]


def test_interleaved_checkpoint_goes_on_under_v(tmp_path: Path, embeddings, uninterrupted) -> None:
    save(tmp_path, (*STOCK_INTERLEAVED, *embeddings))
    assert losses((*V, *embeddings, "--load", str(tmp_path))) == uninterrupted[2:]


def test_v_checkpoint_goes_on_with_fewer_ranks_and_another_schedule(saved_by_v, embeddings, uninterrupted):
    flags = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1", *embeddings)
    resumed = train(2, [*flags, *STEPS, "--load", str(saved_by_v)])
    assert resumed[-1].losses == pytest.approx(uninterrupted[2:], rel=rounding.of_losses(updates=1))
