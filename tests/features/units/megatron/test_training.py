"""Megatron's own loop on packed documents: an order by their lengths equals stock on data in that order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.comparison import Result, assert_same_bits, run
from tests.support.told_documents import END, told

# isort: split
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_pp_ext.features.units.megatron import run_costs, steps

MICROBATCHES = 8
APART = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--clip-grad", "0")
PIPELINE = ("--pipeline-model-parallel-size", "2")
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags for documents of 2 to 40 tokens, where a sequence has 32."""
    prefix: Path = tmp_path_factory.mktemp("documents") / "packed"
    random = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(END))
    for length in random.integers(2, 41, 600):
        document = [*random.integers(0, END, length - 1), END]
        builder.add_document(np.array(document), [length])
    builder.finalize(f"{prefix}.idx")
    return ("--data-path", str(prefix), "--split", "98,1,1", *APART)


def trained(flags: tuple[str, ...], order: Any = int, replicas: int = 1) -> Result:
    """Train on the samples in ``order``."""
    with told(order):
        batch = "--global-batch-size", str(MICROBATCHES * replicas)
        return run(2 * replicas, [*PIPELINE, *batch, *flags])


def watched_orders(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let rank 0 write the order of each step to ``file``."""
    plan = steps.Ordered.planned

    def watched(self: Any, step: Any, agreed: Any) -> Any:
        found = plan(self, step, agreed)
        if step.plan.rank == 0:
            with file.open("a") as lines:
                lines.write(" ".join(map(str, found.reads)) + "\n")
        return found

    monkeypatch.setattr(steps.Ordered, "planned", watched)


def assert_equal_to_stock_in_order(
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    flags: tuple[str, ...],
    schedule: str,
    steps: int,
    replicas: int = 1,
    moved: int | None = None,
) -> None:
    """Train for so many ``steps``, and by stock on the samples in the order that ours has planned.

    All ``replicas`` have one order.  The first ``moved`` steps, by default all, have not that of the data.
    """
    watched_orders(monkeypatch, file)
    flags = (*flags, "--train-iters", str(steps))
    ours = trained((*flags, "--pipeline-schedule", *schedule.split()), replicas=replicas)
    planned = [[*map(int, line.split())] for line in file.read_text().splitlines()]
    orders = planned[::replicas]
    assert sorted(planned) == sorted(orders * replicas)
    assert len(orders) == steps and all(order != sorted(order) for order in orders[:moved])

    def place_of(number: int) -> int:
        sample, replica = divmod(number, replicas)
        step, place = divmod(sample, MICROBATCHES)
        if step >= len(orders):
            return number
        return (step * MICROBATCHES + orders[step][place]) * replicas + replica

    stock = trained(flags, place_of, replicas)
    # What Megatron reports of a step is a sum over microbatches, in the order of the data here.
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
    assert_same_bits(ours._replace(losses=stock.losses), stock)


@pytest.mark.parametrize("schedule", ["1f1b --pipeline-order rule", "v-half --pipeline-order search"])
def test_an_order_equals_stock_on_data_in_that_order(monkeypatch, tmp_path, documents, schedule):
    assert_equal_to_stock_in_order(monkeypatch, tmp_path / "orders", documents, schedule, steps=2)


def test_pipelines_that_share_experts_run_in_one_order(monkeypatch, tmp_path, documents):
    """Each has data of its own, and the exchanges of their tokens meet in every layer."""
    flags = (*documents, *EXPERTS.split())
    schedule = "zb-h1 --pipeline-order rule"
    assert_equal_to_stock_in_order(monkeypatch, tmp_path / "orders", flags, schedule, steps=2, replicas=2)


def test_measured_steps_tell_the_costs_of_later_ones(monkeypatch, tmp_path, documents, said_by):
    said = said_by(run_costs)
    schedule = "zb-h1 --pipeline-order rule --pipeline-profile-steps 1-2"
    # By what a busy machine took, all microbatches may seem to cost the same.
    assert_equal_to_stock_in_order(monkeypatch, tmp_path / "orders", documents, schedule, steps=4, moved=2)
    assert "microbatches are ordered by what 8 measured ones took" in said.read_text()
