"""Megatron's own graphs (``local``) of its own layers, on a stub of capture.

``tests/engine/test_engine_local_graphs.py`` has more jobs, with Transformer Engine's layers.
"""

import pytest
from megatron.core.transformer import cuda_graphs as stock_graphs

from megatron_pp_ext.megatron.releases import CORE_0_18
from tests.support import graph_stub, training

pytestmark = training.since(CORE_0_18, "its graphs overwrite inputs of layers under a pipeline")

FLAGS = (
    "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b-v --position-embedding-type rope "
    "--eval-iters 1 --eval-interval 1 --eval-global-batch-size 6"
)
GRAPHS = "--cuda-graph-impl local --inference-rng-tracker --pipeline-unproved"


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(graph_stub.Graph, "replayed", 0)  # of other tests in this process
    graph_stub.install(monkeypatch.setattr)
    graph_stub.permit_local_graphs(stock_graphs, monkeypatch.setattr)
    monkeypatch.setattr(graph_stub.Graph, "register_generator_state", None, raising=False)


_replays: list[int] = []


def count_replays(chunks):
    _replays.append(graph_stub.Graph.replayed)


def test_steps_of_graphs_are_those_of_eager_layers(captures):
    """With evaluations between them, which have another number of microbatches and run eagerly."""
    flags = f"{FLAGS} {GRAPHS}".split()
    graphed = training.train(2, flags, grab=lambda chunks: _replays, disturb=count_replays)
    eager = training.train(2, FLAGS.split())
    for of_graphs, run in zip(graphed, eager, strict=True):
        # Each of the rank's 4 layers goes forward and backward in each of 8 microbatches.
        assert of_graphs.grabbed == [0, 64, 128]
        assert (of_graphs.losses, of_graphs.validation) == (run.losses, run.validation)
        assert of_graphs.grad_norms == run.grad_norms
