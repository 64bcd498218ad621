"""ms-swift's training step on mcore-bridge's models under our schedules: as without us, to the last bit."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.megatron.step_numbers import BUBBLE, PEAK, PEAK_TO_PLAN
from tests.support import frameworks, rounding

if "megatron.bridge" in sys.modules:
    # It gives Megatron's multi-token prediction a forward that needs mcore-bridge's own config.
    pytest.skip(
        "mcore-bridge changes Megatron for all in its process: run this file alone", allow_module_level=True
    )
frameworks.require("mcore_bridge")
frameworks.require("swift")
frameworks.name_engine_layers()
# TorchScript goes by the identity of functions, and stumbles over stand-ins for torch.cuda.
torch.jit._state.disable()

from tests.frameworks import swift  # noqa: E402
from tests.frameworks.swift_goals import CHANNELS, EMBEDDINGS, PREFERENCES, RANKING  # noqa: E402
from tests.support.training import scalars  # noqa: E402


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in Hugging Face's format."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(swift.LLAMA).save_pretrained(folder)
    return folder


@cache
def stock_of(weights: Path, goal: str = "") -> swift.Run:
    return swift.train(str(weights), None, goal=goal)


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("zb-h1", 1), ("interleaved", 2)])
def test_same_bits_as_stock(name: str, chunks: int, weights: Path) -> None:
    """Microbatches of several lengths, and as many as no interleaved schedule of stock's would take."""
    ours, theirs = swift.train(str(weights), name, chunks), stock_of(weights)
    assert (ours.steps, theirs.steps) == ([*swift.MICROBATCHES, swift.MICROBATCHES[-1]], [])
    assert len(ours.losses) == sum(swift.MICROBATCHES)
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation != []
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    assert ours.weights.keys() == theirs.weights.keys()
    assert not [name for name in ours.weights if not torch.equal(ours.weights[name], theirs.weights[name])]


@pytest.mark.parametrize("name", ["v-half", "interleaved"])
@pytest.mark.parametrize("goal", [EMBEDDINGS, RANKING])
def test_an_evaluation_measures_where_the_loss_is(name: str, goal: str, weights: Path) -> None:
    """It reads on the last rank what the loss function has kept there."""
    ours, theirs = swift.train(str(weights), name, 2, goal), stock_of(weights, goal)
    assert ours.losses == theirs.losses != []
    assert ours.validation == theirs.validation
    assert len(theirs.validation) > 1
    assert not [name for name in ours.weights if not torch.equal(ours.weights[name], theirs.weights[name])]


@pytest.mark.parametrize("name", ["v-half", "interleaved"])
@pytest.mark.parametrize("goal", [CHANNELS, PREFERENCES])
def test_other_losses(name: str, goal: str, weights: Path) -> None:
    """A loss for each channel of the data; preferences (DPO), with the model that stays in each stage."""
    ours, theirs = swift.train(str(weights), name, 2, goal), stock_of(weights, goal)
    assert ours.steps
    assert len({tuple(names) for names in theirs.losses}) == (3 if goal == CHANNELS else 1)
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation != []
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    assert not [name for name in ours.weights if not torch.equal(ours.weights[name], theirs.weights[name])]


@pytest.mark.parametrize("goal", ["", PREFERENCES])
def test_microbatches_in_a_planned_order(goal: str, weights: Path) -> None:
    """The trainer finds each loss at its own microbatch; only the sums of gradients have another order."""
    ours, theirs = swift.train(str(weights), "zb-h1", goal=goal, order="rule"), stock_of(weights, goal)
    first = swift.MICROBATCHES[0]
    assert ours.losses[:first] == theirs.losses[:first], "no weight has changed by then"
    for mine, stock in zip(ours.losses, theirs.losses, strict=True):
        assert mine == {name: pytest.approx(value, rel=1e-2, abs=1e-4) for name, value in stock.items()}


def test_weights_come_and_go_by_name(weights: Path) -> None:
    """What its loader reads under a V and its exporter writes again is the file itself."""
    from safetensors.torch import load_file

    run = swift.train(str(weights), "v-half", chunks=2)
    file = load_file(weights / "model.safetensors")
    assert run.exported.keys() == file.keys()
    assert not [name for name in file if not torch.equal(file[name], run.exported[name])]


def test_numbers_in_its_log(weights: Path, tmp_path: Path) -> None:
    """Its line of a step and TensorBoard have them from the second step on; an evaluation has none."""
    swift.train(str(weights), "v-half", 2, output=str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "logging.jsonl").read_text().splitlines()]
    (first, *others), evaluation = lines[:-1], lines[-1]
    assert [{name for name in line if name.startswith("pipeline")} for line in lines] == [
        set(),
        *[{BUBBLE, PEAK, PEAK_TO_PLAN}] * 2,
        set(),
    ]
    logged = scalars(tmp_path)["train/pipeline_bubble"]
    assert list(logged.values()) == pytest.approx([line[BUBBLE] for line in others], rel=1e-5)
    assert "loss" in first and "eval_loss" in evaluation
