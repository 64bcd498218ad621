"""Random jobs, fixed or of the commit; the hunt draws the same again, notices a defect and shrinks it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from megatron_pp_ext.integration.core import local_linear
from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.check import check, require_one_forward_order
from megatron_pp_ext.schedule.placement import v
from megatron_pp_ext.verification.tolerances import Arithmetic
from tests.conftest import CACHE
from tests.hunt.fuzz import job, judge, shrink
from tests.hunt.fuzz.draw import TOGETHER, draw
from tests.hunt.fuzz.factors import FACTORS, FORBIDDEN, Row, is_legal, levels
from tests.hunt.fuzz.report import sections, told
from tests.hunt.fuzz.trial import Kind, Outcome, Trials
from tests.support.comparison import Result
from tests.support.few_trials import few_trials
from tests.support.random_orders import random_schedule
from tests.support.ranks import RankError

ROOT = Path(__file__).parents[3]


def seed_of_commit() -> int:
    """The first digits of the commit; 2 where there is no git."""
    git = shutil.which("git")
    if not git or not (ROOT / ".git").exists():
        return 2
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(head.stdout[:7] or "2", 16)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with few_trials(os.path.join(os.environ[CACHE], "short")):
        yield Trials(tmp_path_factory.mktemp("fuzz"))


FIXED = [pytest.param(1, number, id=f"fixed-{number}") for number in range(TOGETHER)]
OF_COMMIT = [pytest.param(seed_of_commit(), number, id=f"of-commit-{number}") for number in range(10)]


@pytest.mark.wide
@pytest.mark.parametrize(("seed", "number"), FIXED + OF_COMMIT)
def test_a_random_job_trains_as_under_stock(seed: int, number: int, trials: Trials) -> None:
    """A case that fails is run again, and shrunk, by the command that the message ends with."""
    row = draw(seed, number)
    outcome = trials(row)
    assert not outcome.kind.is_finding, "\n" + told(seed, (number, row, outcome))


def plain(**choices: str) -> Row:
    """The plainest row, but for ``choices``."""
    none = {"seed": "1", "schedule": "v-half", "measures": "none", "resume": "none"}
    return {**none, **{factor: levels(factor)[0] for factor in FACTORS}, **choices}


def test_drawing_goes_by_the_seed_alone() -> None:
    """Another process, whose hashes are others, draws the same."""
    program = "from tests.hunt.fuzz.draw import draw; print([draw(7, number) for number in range(20)])"
    again = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.splitlines()[-1] == str([draw(7, number) for number in range(20)])
    assert draw(7, 0) != draw(8, 0)


def test_neighbours_share_a_run_of_stock(tmp_path: Path) -> None:
    rows = [draw(7, number) for number in range(TOGETHER)]
    assert len({tuple(job.stock(row, tmp_path)) for row in rows}) == 1
    assert len({row["schedule"] for row in rows}) == TOGETHER


def test_everything_is_drawn_and_nothing_forbidden() -> None:
    rows = [draw(1, number) for number in range(0, 3200, TOGETHER)]
    assert all(is_legal(row) for row in rows)
    for factor in FACTORS:
        assert {row[factor] for row in rows} == set(levels(factor)), factor


def test_forbidden_choices_exist_and_leave_a_plain_job() -> None:
    assert is_legal(plain())
    for why, choices in FORBIDDEN:
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


def _scales_gradients_of_swiglu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a defect: with --swiglu a W adds gradients that are a thousandth too large."""
    add = local_linear.add_gradient

    def wrong(weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        add(weight, gradient * 1.001 if "--swiglu" in sys.argv else gradient)

    monkeypatch.setattr(local_linear, "add_gradient", wrong)


@pytest.mark.wide
def test_a_planted_defect_is_found_and_shrunk(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    _scales_gradients_of_swiglu(monkeypatch)
    row = plain(mlp="swiglu", biases="no", clipping="engages", measures="trace")
    outcome = trials(row)
    assert outcome.kind is Kind.DIFFERENT
    assert re.match(r"\d+ of \d+ gradients, most 0.001: ", outcome.lines[0])
    least = shrink.shrunk(row, lambda plainer: trials(plainer).is_like(outcome))
    assert least == plain(mlp="swiglu")
    story = told(3, (5, row, outcome), least)
    assert "shows it: 2 ranks, --pipeline-model-parallel-size 2; schedule v-half; --swiglu\n" in story
    assert story.endswith("again: make fuzz SEED=3 CASE=5")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ranks [0, 1] did not finish in 240 seconds", Kind.HUNG),
        (
            "rank 0 failed\n\n--- rank 0 ---\nSystemExit: megatron_pp_ext: memory limit 1 is infeasible",
            Kind.REFUSED,
        ),
        ("rank 0 failed\n\n--- rank 0 ---\nSystemExit: megatron_pp_ext: never heard of it", Kind.FAILED),
        ("rank 1 failed\n\n--- rank 1 ---\nKeyError: 'x'", Kind.FAILED),
    ],
)
def test_what_comes_of_a_run_that_fails(error: str, kind: Kind, tmp_path: Path) -> None:
    """A refusal that the hunt does not know is a finding, as a crash is; so is what stock cannot run."""

    def train(ranks: int, flags: list[str]) -> Result:
        if "--pipeline-schedule" in flags or "--swiglu" in flags:
            raise RankError(error)
        return Result([4.0] * 3, {}, [], [1.0] * 3, [], 1.0)

    trials = Trials(tmp_path, train)
    assert trials(plain()).kind is kind
    assert trials(plain(mlp="swiglu")).kind is Kind.STOCK_FAILED
    assert Kind.STOCK_FAILED.is_finding


def test_the_loss_store_that_is_drawn_is_our_run_s(tmp_path: Path) -> None:
    given = []

    def train(ranks: int, flags: list[str], initialize: object = None) -> Result:
        given.append((("--pipeline-schedule" in flags), initialize is not None))
        return Result([4.0] * 3, {}, [], [1.0] * 3, [], 1.0)

    Trials(tmp_path, train)(plain(store="jagged"))
    assert given == [(False, False), (True, True)]


def test_the_page_counts_cases_and_tells_findings() -> None:
    bad = Outcome(Kind.DIFFERENT, ("step 2: lm loss 4.1 and under stock 4.2",), 3.0)
    cases = [(0, plain(), Outcome(Kind.EQUAL, (), 2.0)), (1, plain(mlp="swiglu"), bad)]
    page = "\n".join(sections(5, cases, {1: plain(mlp="swiglu")}))
    assert "2 cases took 5 seconds, 2.5 each" in page
    assert "| v-half | 1 | 0 | 1 |" in page
    assert "| mlp: swiglu | 0 | 0 | 1 |" in page
    assert "again: make fuzz SEED=5 CASE=1" in page


def test_prediction_rounds_the_output_weight_as_its_gradients_are_kept() -> None:
    """In bf16, 1.2 parts in a hundred were seen in five microbatches, where fp32 has 1e-5."""
    allowed = {
        precision: Arithmetic(precision, prediction=True).gradient("output_layer.weight").allowed
        for precision in ("fp32", "bf16")
    }
    assert allowed == {"fp32": 1e-5, "bf16": 2e-2}


@pytest.mark.parametrize(
    ("skipped", "other_order", "mine", "is_equal"),
    [
        (True, True, [1.0, torch.inf, 3.0], True),
        (True, True, [1.5, torch.inf, 3.0], False),
        (True, False, [1.0, torch.inf, 3.0], False),
        (True, False, [1.0, 2.0, torch.inf], True),
        (False, True, [1.0, torch.inf, 3.0], False),
        (False, True, [1.0, torch.nan, torch.inf], False),
    ],
)
def test_gradients_that_overflow(skipped: bool, other_order: bool, mine: list[float], is_equal: bool) -> None:
    """In a step that fp16 skips; where sums are taken in another order, they may overflow elsewhere."""
    norms: list[float | None] = [None if skipped else 1.0]
    stock = Result([4.0], {("weight", 0): torch.tensor([1.0, 2.0, torch.inf])}, [], norms, [], 1.0)
    ours = stock._replace(gradients={("weight", 0): torch.tensor(mine)})
    allowed = judge.arithmetic(["--fp16"], 2, other_order)
    assert (not list(judge.differences(ours, stock, allowed))) is is_equal
