"""Graphs of layers by Transformer Engine's and Megatron's own code, captured and replayed on a CPU."""

import functools
import hashlib
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

from megatron_pp_ext import cpu
from megatron_pp_ext.schedule import placement
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.slots import Slots
from tests.support import training
from tests.support.graph_stub import Graph
from tests.support.random_orders import random_schedule

ENGINE = (
    "--transformer-impl transformer_engine --bf16 --te-rng-tracker --pipeline-model-parallel-size 2 "
    "--train-iters 4 --untie-embeddings-and-output-weights"
)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 --pipeline-unproved"

UNCHECKED = "--pipeline-schedule v-half --no-check-for-nan-in-loss-and-grad"

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


def train(*flags, ranks=2):
    """Return each rank's digests of gradients by step, its replays by step, and all losses."""
    words = " ".join([ENGINE, *flags]).split()
    runs = training.train(ranks, words, grab=lambda chunks: _steps, disturb=note_step)
    steps = [run.grabbed for run in runs]
    digests = [[digest for digest, _ in of_rank] for of_rank in steps]
    numbers = digests, [(run.losses, run.validation) for run in runs]
    return numbers, [[count for _, count in of_rank] for of_rank in steps]


@functools.cache
def eagerly(*flags, ranks=2):
    return train(*flags, ranks=ranks)[0]


def assert_same_numbers(*flags, ranks=2):
    numbers, replays = train(*flags, GRAPHS, ranks=ranks)
    assert numbers == eagerly(*flags, ranks=ranks)
    assert all(counts[0] == 0 < counts[1] < counts[2] for counts in replays)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "v-half", "v-zb"])
def test_steps_of_graphs_are_those_of_eager_layers(schedule):
    assert_same_numbers(f"--pipeline-schedule {schedule}")


JOBS = {
    "an evaluation between": (2, "--pipeline-schedule v-half --eval-iters 1 --eval-interval 2"),
    "overlapped reduction": (4, "--pipeline-schedule v-half --overlap-grad-reduce"),
    "as it comes": (4, "--pipeline-schedule zb-h1 --overlap-grad-reduce --no-align-grad-reduce"),
    "more microbatches than slots": (2, "--pipeline-schedule gpipe --rampup-batch-size 4 4 8"),
    "attention alone": (2, "--pipeline-schedule v-half --cuda-graph-modules attn"),
    "flex": (2, "--pipeline-schedule flex --pipeline-memory-limit 0.75"),
    "in pairs": (
        4,
        "--pipeline-schedule dualpipe-v --num-experts 2 --expert-model-parallel-size 2 "
        "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall --disable-bias-linear "
        "--cuda-graph-modules attn",
    ),
    "without a pair on the first rank": (
        4,
        "--pipeline-schedule interleaved --num-experts 2 --expert-model-parallel-size 2 "
        "--global-batch-size 4 --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear --cuda-graph-modules attn",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs_with_graphs(name):
    ranks, flags = JOBS[name]
    assert_same_numbers(flags, ranks=ranks)


def test_a_traced_job_whose_reductions_overlap(tmp_path):
    """The saved weight of the output layer, whose kernel adds its gradient, comes back as an alias."""
    trace = f"--pipeline-trace {tmp_path / 'trace.json'}"
    assert_same_numbers(f"--pipeline-schedule 1f1b --overlap-grad-reduce {trace}")


@pytest.mark.parametrize(
    ("place", "seed"), [(placement.linear(2), 3), (placement.v(2), 2), (placement.v(2), 3)]
)
def test_graphs_follow_any_order(place, seed, tmp_path):
    """Halved and whole backwards at random, microbatches in any order but the first."""
    schedule = random_schedule(random.Random(seed), place, 8, in_turn="F")
    number = [0, *random.Random(seed).sample(range(1, 8), 7)]
    orders = [
        [Action(stage, kind, number[microbatch]) for stage, kind, microbatch in order]
        for order in schedule.orders
    ]
    schedule = replace(schedule, orders=tuple(map(tuple, orders)))
    csv_file.write(schedule, tmp_path / "order.csv")
    assert_same_numbers(f"--pipeline-schedule csv:{tmp_path / 'order.csv'}")


def ends_at_input(stock, steps):
    return stock([[action for action in step if action.kind is not Kind.W] for step in steps])


def one_slot_less(stock, steps):
    slots = stock(steps)
    return Slots({unit: max(0, slot - 1) for unit, slot in slots.by_unit.items()}, slots.count - 1)


@pytest.mark.parametrize("defect", [ends_at_input, one_slot_less])
def test_a_slot_that_ends_early_gives_wrong_numbers(defect, monkeypatch):
    stock = Slots.of
    monkeypatch.setattr(Slots, "of", lambda steps: defect(stock, steps))
    assert train(UNCHECKED, GRAPHS)[0] != eagerly(UNCHECKED)


def test_layers_that_share_gradients_give_wrong_numbers(monkeypatch):
    """Transformer Engine lets layers share the buffers of their outputs' gradients, which W reads."""
    stock = stock_graphs.make_graphed_callables
    shared = {"_reuse_graph_input_output_buffers": True}
    monkeypatch.setattr(
        stock_graphs, "make_graphed_callables", lambda *args, **options: stock(*args, **{**options, **shared})
    )
    assert train(UNCHECKED, GRAPHS)[0] != eagerly(UNCHECKED)
