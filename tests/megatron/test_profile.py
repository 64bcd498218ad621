"""--profile-pipeline: every layer once and in order, and what a layer costs is its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from megatron_pp_ext.cli.partition import training_flags
from megatron_pp_ext.cpu import torch_stubs
from megatron_pp_ext.job.layers import stages_of
from megatron_pp_ext.job.pipeline import require_files
from megatron_pp_ext.pipedream.partition.partitioner import layout_of, partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import Profile, read
from tests.support.clock import TICK, Clock
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, train

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 8, 32, 32, 64
HIDDEN_BYTES = 4 * HIDDEN * SEQUENCE
SLOW = 0.1


def profile(ranks: int, flags: str, file: Path) -> Profile:
    train(ranks, [*flags.split(), "--profile-pipeline", str(file)])
    return read(file)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first(
        1,
        [
            (4, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t*5|t*3|L"),
            (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
            (1, "--untie-embeddings-and-output-weights"),
        ],
    ),
)
def test_every_layer_once(ranks: int, flags: str, tmp_path: Path) -> None:
    found = profile(ranks, flags, tmp_path / "profile.json")
    assert found.is_chain
    assert "".join(layer.symbol for layer in found.layers) == "E" + LAYERS * "t" + "L"
    assert [layer.name for layer in found.layers[1:-1]] == [f"layer {n}" for n in range(1, LAYERS + 1)]
    embedding, *layers, output = found.layers
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in found.layers)
    assert {layer.activation_bytes for layer in (embedding, *layers)} == {HIDDEN_BYTES}
    assert output.activation_bytes == 4 * SEQUENCE  # a loss a token
    # Weights: words and positions; 12 h^2 + 13 h a layer; the last norm, and the words again.
    assert embedding.parameter_bytes == 4 * HIDDEN * (VOCABULARY + SEQUENCE)
    assert {layer.parameter_bytes for layer in layers} == {4 * (12 * HIDDEN**2 + 13 * HIDDEN)}
    assert output.parameter_bytes == 4 * (2 * HIDDEN + HIDDEN * VOCABULARY)
    # A rank's first layer keeps the attention mask as well, which the others share.
    own = min(layer.saved_bytes for layer in layers)
    assert {layer.saved_bytes - own for layer in layers} <= {0, SEQUENCE**2}
    assert own > 8 * HIDDEN_BYTES


def slow_layer(chunks: list[torch.nn.Module]) -> None:
    """Let the feed-forward of layer 5 take time in its forward, and twice as long in its backward."""
    initialize_by_layer(chunks)
    clock = Clock()

    def take_time(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> None:
        clock.pass_by(SLOW)
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: clock.pass_by(2 * SLOW))

    torch_stubs.time = SimpleNamespace(perf_counter=clock)
    for chunk in unwrap_model(chunks):
        for layer in chunk.decoder.layers:
            if layer.layer_number == 5:
                layer.mlp.register_forward_hook(take_time)


def test_time_goes_to_the_layer_that_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    pipeline = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"]
    train(2, [*pipeline, "--profile-pipeline", str(file)], initialize=slow_layer)
    layers = read(file).layers
    for layer in layers:
        slow = SLOW if layer.name == "layer 5" else 0.0
        measured = layer.forward_seconds, layer.backward_seconds
        # Pieces that run meanwhile read the clock as well, and each of their readings is a tick.
        assert measured == pytest.approx((slow, 2 * slow), abs=LAYERS * TICK, rel=0), layer.name


def test_mpp_profile_takes_a_real_run_s_flags(tmp_path: Path) -> None:
    """It turns them into four steps of one rank, whose profile can be cut into a layout for four."""
    flags = "--train-iters 1000 --lr-warmup-iters 100 --pipeline-model-parallel-size 4 --micro-batch-size=2"
    (run,) = train(1, training_flags(tmp_path / "profile.json", flags.split()))
    assert len(run.losses) == 4
    measured = read(tmp_path / "profile.json")
    assert measured.layers[1].activation_bytes == 2 * HIDDEN_BYTES
    layout = layout_of(partition(measured, [Level(4, 1e9)], straight=True), measured)
    stages = stages_of(layout)
    assert (len(stages), "".join(stages)) == (4, "E" + LAYERS * "t" + "L")


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere/a\.json: no such folder; make it first"):
        require_files(Path("nowhere/a.json"), None)
