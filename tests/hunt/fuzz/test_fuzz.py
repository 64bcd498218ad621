"""What is drawn, and random jobs that train as under stock; ``make fuzz`` draws more of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from megatron_pp_ext.schedule.check import check, require_one_forward_order
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import v
from tests.conftest import CACHE
from tests.hunt.fuzz import job
from tests.hunt.fuzz.draw import TOGETHER, draw, plain
from tests.hunt.fuzz.factors import FACTORS, FORBIDDEN, is_legal, levels
from tests.hunt.fuzz.noise import LastBits
from tests.hunt.fuzz.report import Found, told
from tests.hunt.fuzz.trial import Trials
from tests.support.comparison import run
from tests.support.few_trials import few_trials
from tests.support.random_orders import random_schedule

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with few_trials(os.path.join(os.environ[CACHE], "short")):
        yield Trials(tmp_path_factory.mktemp("fuzz"))


NUMBERS = [pytest.param(number, marks=pytest.mark.wide if number else ()) for number in range(3 * TOGETHER)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_job_trains_as_under_stock(number: int, trials: Trials) -> None:
    """A case that fails is run again, and shrunk, by the command that the message ends with."""
    row = draw(1, number)
    outcome = trials(row)
    assert not outcome.kind.is_finding, "\n" + told(1, Found(number, row, outcome))


@pytest.mark.wide
def test_drawing_goes_by_the_seed_alone() -> None:
    """Another process, whose hashes are others, draws the same."""
    rows = [draw(7, number) for number in range(20)]
    program = "from tests.hunt.fuzz.draw import draw; print([draw(7, number) for number in range(20)])"
    again = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.splitlines()[-1] == str(rows)
    assert rows[0] != draw(8, 0)


def test_neighbours_share_a_run_of_stock(tmp_path: Path) -> None:
    rows = [draw(7, number) for number in range(TOGETHER)]
    assert len({tuple(job.stock(row, tmp_path)) for row in rows}) == 1
    assert len({row["schedule"] for row in rows}) == TOGETHER


def test_everything_is_drawn_and_nothing_forbidden() -> None:
    rows = [draw(1, number) for number in range(0, 3200, TOGETHER)]
    assert all(is_legal(row) for row in rows)
    for factor in FACTORS:
        assert {row[factor] for row in rows} == set(levels(factor)), factor
    assert is_legal(plain())
    assert {row["slices"] for row in rows} == {"none", "4", "8", "16"}
    assert all(job.is_cut(row) for row in rows if row["slices"] != "none")
    for why, choices in FORBIDDEN.items():
        for factor, names in choices.items():
            assert names == "others" or set(names.split()) <= set(levels(factor)), why


@pytest.mark.parametrize("in_turn", ["", "F", "FIW"])
def test_random_orders_are_valid(in_turn: str, tmp_path: Path) -> None:
    for seed in range(20):
        schedule = random_schedule(Random(seed), v(3), 4, in_turn)
        check(schedule)
        csv_file.write(schedule, tmp_path / "random.csv")
        assert csv_file.read(tmp_path / "random.csv").orders == schedule.orders
        if "F" in in_turn:
            require_one_forward_order(schedule)


@pytest.mark.wide
def test_noise_moves_later_steps_alone() -> None:
    """By about as much as its size, the same on all replicas; another draw moves them otherwise."""
    flags = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--num-layers", "2"]
    flags += ["--global-batch-size", "2", "--optimizer", "sgd", "--lr", "0.1"]
    stock = run(4, flags)
    noisy = [run(4, flags, disturb=LastBits("bf16", draw)) for draw in (0, 1)]
    for disturbed in noisy:
        assert disturbed.losses[0] == stock.losses[0]
        assert 0 < abs(disturbed.losses[1] - stock.losses[1]) < 0.01
    assert noisy[0].losses != noisy[1].losses
