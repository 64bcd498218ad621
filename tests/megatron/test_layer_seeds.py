"""--pipeline-layer-seeds: a fresh run starts from the same weights under every placement."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from megatron_pp_ext.cpu import flags as cpu_flags
from megatron_pp_ext.megatron.trainer.layer_seeds import FLAG, draw_chunks
from tests.support.comparison import Result, assert_same_bits, run
from tests.support.tiers import first
from tests.support.training import train

PIPELINE = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4"),
    *("--global-batch-size", "4", "--train-iters", "2", "--clip-grad", "0"),
)
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-router-topk 2"
MODELS = {
    "tied": (2, ()),
    "prediction": (2, ("--mtp-num-layers", "2", "--position-embedding-type", "rope", UNTIED)),
    "tp2-untied-experts": (
        4,
        ("--tensor-model-parallel-size", "2", "--sequence-parallel", *EXPERTS.split(), UNTIED),
    ),
}


def fresh(world_size: int, *flags: str) -> Result:
    """Train from the weights that Megatron itself draws."""
    return run(world_size, [*PIPELINE, *flags], initialize=lambda chunks: None)


@pytest.mark.parametrize("model", first(1, MODELS))
def test_fresh_runs_start_from_the_same_weights(model: str) -> None:
    world_size, flags = MODELS[model]
    stock = fresh(world_size, *flags, FLAG)
    ours = fresh(world_size, *flags, FLAG, "--pipeline-schedule", "v-half")
    assert ours.losses[0] == stock.losses[0]
    if model == "tied":
        assert_same_bits(ours, stock)
        # Without the flag the placement decides.
        assert fresh(2, "--pipeline-schedule", "v-half").losses[0] != fresh(2).losses[0]


def test_weights_drawn_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a tensor's parts are drawn from states of Megatron's tracker, not the default generator."""
    on_a_gpu = tuple(flag for flag in cpu_flags.CPU_FLAGS if flag[0] != "--use-cpu-initialization")
    monkeypatch.setattr(cpu_flags, "CPU_FLAGS", on_a_gpu)
    flags = ("--tensor-model-parallel-size", "2", UNTIED)
    stock = fresh(4, *flags, FLAG)
    ours = fresh(4, *flags, FLAG, "--pipeline-schedule", "v-half")
    assert_same_bits(ours, stock)
    weight = "decoder.layers.1.mlp.linear_fc1.weight"
    assert not torch.equal(*(stock.gradients[weight, rank] for rank in (0, 1)))


def _draw_part(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Draw a chunk without layers, and require that all generators are put back to where they were."""
    tracker, drawn = get_cuda_rng_tracker(), []

    def build_chunk(**unused: Any) -> torch.nn.Module:
        with tracker.fork():
            drawn.append(torch.rand(3))
        drawn.append(torch.rand(3))
        return unwrap_model(chunks[0])

    before, states, seeds = torch.get_rng_state(), tracker.get_states(), set(tracker.seeds_)
    with pytest.raises(SystemExit, match="this script builds another model"):  # no layers
        draw_chunks(lambda build: build(None, vp_stage=0))(build_chunk)
    assert torch.equal(before, torch.get_rng_state())
    assert tracker.seeds_ == seeds
    assert tracker.get_states().keys() == states.keys()
    assert all(torch.equal(state, states[name]) for name, state in tracker.get_states().items())
    return drawn


def test_generators_are_put_back() -> None:
    flags = [*PIPELINE, FLAG, "--pipeline-schedule", "v-half", "--tensor-model-parallel-size", "2"]
    runs = train(4, flags, grab=_draw_part)
    tracked, plain = zip(*(run.grabbed for run in runs), strict=True)
    assert all(torch.equal(plain[0], other) for other in plain)
    # Ranks 0 and 1 share a layer, ranks 2 and 3 are next in the pipeline.
    assert torch.equal(tracked[0], tracked[2])
    assert torch.equal(tracked[1], tracked[3])
    assert not torch.equal(tracked[0], tracked[1])
