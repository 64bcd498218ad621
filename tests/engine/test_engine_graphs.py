"""Graphs of layers by Transformer Engine's and Megatron's own code, captured and replayed on a CPU."""

import hashlib
import sys

import pytest

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

from megatron_pp_ext import cpu
from tests.support import training
from tests.support.graph_stub import Graph

ENGINE = (
    "--transformer-impl transformer_engine --bf16 --te-rng-tracker --pipeline-model-parallel-size 2 "
    "--train-iters 4 --untie-embeddings-and-output-weights"
)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 --pipeline-unproved"

_steps: list[str] = []


@pytest.fixture(autouse=True)
def kernels_are_there(monkeypatch):
    """Let weight gradients be accumulated by a kernel, into ``main_grad``."""
    needed = tuple(flag for flag in cpu.flags.CPU_FLAGS if flag != ("--no-gradient-accumulation-fusion",))
    monkeypatch.setattr(cpu.flags, "CPU_FLAGS", needed)


def note_step(chunks):
    """Note a digest of all gradients, and how many graphs were replayed."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            digest.update((parameter.main_grad + 0).numpy().tobytes())
    _steps.append((digest.hexdigest(), Graph.replayed))


def train(*flags):
    """Return each rank's digests of gradients by step, its replays by step, and all losses."""
    words = " ".join([ENGINE, *flags]).split()
    runs = training.train(2, words, grab=lambda chunks: _steps, disturb=note_step)
    steps = [run.grabbed for run in runs]
    digests = [[digest for digest, _ in of_rank] for of_rank in steps]
    return digests, [[count for _, count in of_rank] for of_rank in steps], [run.losses for run in runs]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_steps_of_graphs_are_those_of_eager_layers(schedule):
    flags = f"--pipeline-schedule {schedule}"
    digests, replays, losses = train(flags, GRAPHS)
    eager_digests, _, eager_losses = train(flags)
    assert digests == eager_digests
    assert losses == eager_losses
    assert all(counts[0] == 0 < counts[1] < counts[2] for counts in replays)
