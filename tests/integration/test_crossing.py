"""Checkpoints cross over between the V, the interleaved and the linear placement, both ways."""

from pathlib import Path

import pytest

from tests.support import rounding
from tests.support.training import train

PIPELINE = ("--pipeline-model-parallel-size", "4")
STEPS = ("--ckpt-format", "torch_dist", "--train-iters", "4", "--clip-grad", "0")
"""Four, without clipping, which would bring the last bits of a norm summed rank by rank into the weights."""
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
"""Gradients are in several buckets, as those of real models."""
V = (*PIPELINE, "--pipeline-schedule", "v-half")
STOCK = PIPELINE
STOCK_INTERLEAVED = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")
UNTIED = ("--untie-embeddings-and-output-weights",)
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
MODELS = {
    "tied": BUCKETS,
    "untied": (*UNTIED, *BUCKETS),
    "untied-distributed": (*UNTIED, *BUCKETS, *RESHARDABLE),
}


def losses(flags: tuple[str, ...]) -> list[float]:
    return train(4, [*flags, *STEPS])[-1].losses


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def uninterrupted(model: tuple[str, ...]) -> list[float]:
    return losses((*STOCK, *model))


def save(folder: Path, flags: tuple[str, ...]) -> None:
    losses((*flags, "--save", str(folder), "--save-interval", "2", "--exit-interval", "2"))


@pytest.fixture(scope="module")
def saved_by_v(tmp_path_factory: pytest.TempPathFactory, model: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("saved-by-v")
    save(folder, (*V, *model))
    return folder


@pytest.fixture(scope="module")
def saved_by_stock(tmp_path_factory: pytest.TempPathFactory, model: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("saved-by-stock")
    save(folder, (*STOCK, *model))
    return folder


@pytest.mark.parametrize("reader", [V, STOCK, STOCK_INTERLEAVED], ids=["v-half", "1f1b", "interleaved"])
def test_v_checkpoint_goes_on(saved_by_v: Path, model, uninterrupted, reader) -> None:
    assert losses((*reader, *model, "--load", str(saved_by_v))) == uninterrupted[2:]


def test_stock_checkpoint_goes_on_under_v(saved_by_stock: Path, model, uninterrupted) -> None:
    assert losses((*V, *model, "--load", str(saved_by_stock))) == uninterrupted[2:]


def test_interleaved_checkpoint_goes_on_under_v(tmp_path: Path, model, uninterrupted) -> None:
    save(tmp_path, (*STOCK_INTERLEAVED, *model))
    assert losses((*V, *model, "--load", str(tmp_path))) == uninterrupted[2:]


def test_v_checkpoint_goes_on_with_fewer_ranks_and_another_schedule(saved_by_v, model, uninterrupted):
    flags = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1", *model)
    resumed = train(2, [*flags, *STEPS, "--load", str(saved_by_v)])
    assert resumed[-1].losses == pytest.approx(uninterrupted[2:], rel=rounding.of_losses(updates=1))
