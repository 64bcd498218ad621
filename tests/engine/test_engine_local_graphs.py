"""Megatron's own graphs (``local``) of Transformer Engine's layers, captured and replayed on a CPU."""

import random
import sys
from dataclasses import replace

import pytest

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

from megatron.core.transformer import cuda_graphs as stock_graphs
from megatron.core.utils import get_model_config

from megatron_pp_ext.megatron.releases import CORE_0_18
from megatron_pp_ext.megatron.runners import local_graphs, model_stage
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog, placement
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.formats import csv_file
from tests.engine.test_engine_graphs import eagerly, kernels_are_there, train  # noqa: F401
from tests.support import graph_stub
from tests.support.graph_stub import Pool
from tests.support.random_orders import random_schedule
from tests.support.training import since

pytestmark = since(CORE_0_18, "its graphs overwrite inputs of layers under a pipeline")

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --pipeline-unproved"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"


@pytest.fixture(autouse=True)
def generators_are_there(monkeypatch):
    graph_stub.permit_local_graphs(stock_graphs, monkeypatch.setattr)


def assert_same_numbers(*flags, ranks=2):
    numbers, replays = train(*flags, GRAPHS, ranks=ranks)
    assert numbers == eagerly(*flags, ranks=ranks)
    assert all(counts[0] == 0 < counts[1] < counts[2] for counts in replays)


JOBS = {
    "1f1b": "--pipeline-schedule 1f1b",
    "gpipe": "--pipeline-schedule gpipe",
    "interleaved, MTP": "--pipeline-schedule interleaved --position-embedding-type rope --mtp-num-layers 1",
    "1f1b-v, rotary": "--pipeline-schedule 1f1b-v --position-embedding-type rope",
    "attention alone": "--pipeline-schedule 1f1b-v --cuda-graph-modules attn",
    "an evaluation between": (
        "--pipeline-schedule 1f1b --eval-iters 1 --eval-interval 2 --eval-global-batch-size 6"
    ),
    "breadth-first": "--pipeline-schedule breadth-first",
}


@pytest.mark.parametrize("name", JOBS)
def test_steps_of_graphs_are_those_of_eager_layers(name):
    assert_same_numbers(JOBS[name])


def test_gradients_that_are_reduced_meanwhile():
    assert_same_numbers("--pipeline-schedule interleaved --overlap-grad-reduce", ranks=4)


@pytest.mark.parametrize("seed", [2, 3])
def test_graphs_hold_any_order(seed, tmp_path):
    """Whole backwards at random in a V, microbatches in any order but the first."""
    schedule = random_schedule(random.Random(seed), placement.v(2), 8, in_turn="F", whole=1.0)
    number = [0, *random.Random(seed).sample(range(1, 8), 7)]
    orders = [
        [Action(stage, kind, number[microbatch]) for stage, kind, microbatch in order]
        for order in schedule.orders
    ]
    csv_file.write(replace(schedule, orders=tuple(map(tuple, orders))), tmp_path / "order.csv")
    assert_same_numbers(f"--pipeline-schedule csv:{tmp_path / 'order.csv'}")


def test_no_gradient_leaves_in_memory_of_graphs(monkeypatch):
    """Its message may be under way when the next graph overwrites it."""
    stock = model_stage.backward_of_stock

    def backward(*args):
        gradient = stock(*args)
        assert gradient is None or not any(pool.has(gradient) for pool in Pool.all)
        return gradient

    monkeypatch.setattr(model_stage, "backward_of_stock", backward)
    assert_same_numbers("--pipeline-schedule 1f1b-v")


@pytest.fixture
def gpipe_at_last(monkeypatch):
    """Let the last steps of 1F1B have another order."""
    stock = FlushedSteps.plan

    def plan(self, inputs):
        usual = stock(self, inputs)
        is_last = inputs.training_steps >= 2
        return plan_rank(catalog.build("gpipe", 2, 8), inputs.group.rank()) if is_last else usual

    monkeypatch.setattr(FlushedSteps, "plan", plan)


def test_another_order_runs_without_graphs(gpipe_at_last):
    flags = "--pipeline-schedule 1f1b"
    numbers, replays = train(flags, GRAPHS)
    assert numbers == eagerly(flags)
    assert all(counts[0] < counts[1] == counts[3] for counts in replays)


@pytest.fixture
def all_by_graphs(monkeypatch):
    """Let graphs be replayed in all steps."""
    replaying = local_graphs._with_outputs
    monkeypatch.setattr(local_graphs, "_eager", lambda model: replaying(get_model_config(model[0])))


def test_another_order_by_graphs_gives_wrong_numbers(gpipe_at_last, all_by_graphs):
    flags = f"--pipeline-schedule 1f1b {UNCHECKED}"
    assert train(flags, GRAPHS)[0] != eagerly(flags)


def test_an_evaluation_by_graphs_gives_wrong_numbers(all_by_graphs):
    flags = f"{JOBS['an evaluation between']} {UNCHECKED}"
    assert train(flags, GRAPHS)[0] != eagerly(flags)
