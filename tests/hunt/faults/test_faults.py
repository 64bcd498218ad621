"""One case of each moment, fault and way to save, and a checkpoint that is not whole."""

import os
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.hunt.faults import jobs
from tests.hunt.faults.cases import FAULTS, MOMENTS, RUNNERS, SAVES, Case, drawn
from tests.hunt.faults.rank import Orders
from tests.hunt.faults.report import line_of, write
from tests.hunt.faults.trial import TRACKER, Outcome, miscounted, try_case
from tests.support.training import training

CASES = [
    Case("stock", "sync", "save", "killed", victim=0, at=0.9),
    Case("v-half", "async", "step", "terminated", victim=1, at=0.6),
    Case("v-half, host", "sync", "copy", "killed", victim=1, at=0.6),
    Case("profile-guided", "async", "save", "asked to exit", victim=0, at=0.5),
    Case("pipedream", "persistent", "evaluation", "stopped", victim=1, at=0.5),
    Case("pipedream-2bw", "sync", "step", "killed", victim=0, at=0.7),
    Case("v-zb, 2 replicas", "persistent", "step", "paused", victim=2, at=0.4),
    Case("zb-h1, ordered", "sync", "step", "killed", victim=1, at=0.5),
    Case("zb-h1", "sync", "evaluation", "killed", victim=1, at=0.5, launcher="torchrun"),
]


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_job_ends_and_goes_on_as_if_nothing_had_happened(case: Case) -> None:
    outcome = try_case(case)
    assert not outcome.problems, line_of(outcome)


@pytest.mark.wide
def test_a_tracker_that_names_a_checkpoint_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    save = training.save_checkpoint

    def save_checkpoint(iteration: int, *args, **kwargs) -> None:
        folder = Path(training.get_args().save)
        (folder / TRACKER).write_text(str(iteration))
        save(iteration, *args, **kwargs)

    monkeypatch.setattr(training, "save_checkpoint", save_checkpoint)
    outcome = try_case(Case("stock", "sync", "save", "killed", victim=1, at=0.4))
    assert "a run that nobody hit failed" in line_of(outcome)


def killed_beside_its_child() -> None:
    if os.fork() == 0:
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("behaviour", "status", "left"),
    [(killed_beside_its_child, -signal.SIGKILL, 1), (stopped, -signal.SIGSTOP, 0), (signal.pause, None, 0)],
)
def test_what_hangs_and_what_is_left_is_noticed(
    behaviour: Callable[[], None],
    status: int | None,
    left: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(jobs, "be_rank", lambda rank, orders: behaviour())
    monkeypatch.setattr(jobs, "LIMIT", 1.0)
    monkeypatch.setattr(jobs, "CLEARING", 0.0)
    ended = jobs.run(1, Orders([], tmp_path))
    assert ended.statuses == {"rank 0": status}
    assert len(ended.left) == left
    assert not ended.results


def test_samples_that_count_twice_or_not_at_all_are_noticed() -> None:
    stock = {0: ["a", "b"], 1: ["c", "d"], 2: ["e", "f"]}
    assert not list(miscounted(stock, stock))
    for used in ({**stock, 1: ["b", "c", "d"]}, {**stock, 1: ["c"]}, {0: stock[0], 2: stock[2]}):
        assert list(miscounted(used, stock)) == ["steps [2] have other samples than stock's"]


def test_a_seed_draws_the_same_cases_and_all_of_them_in_time() -> None:
    cases = list(islice(drawn(seed=1), 800))
    assert cases == list(islice(drawn(seed=1), 800)) != list(islice(drawn(seed=2), 800))
    seen = {(case.runner, case.save, case.moment, case.fault) for case in cases}
    # One runner has no exit signals, and one alone has copies to be hit in.
    others = (len(RUNNERS) * len(FAULTS) - 1) * (len(MOMENTS) - 1)
    assert len(seen) == (others + len(FAULTS)) * len(SAVES)


def test_the_page_counts_what_went_wrong(tmp_path: Path) -> None:
    well, wrong = (Case("v-half", "sync", "step", "killed", victim=0, at=at) for at in (0.1, 0.2))
    page = tmp_path / "faults.md"
    write(
        [Outcome(well, "step 2", 1.5, 0), Outcome(wrong, "step 3", 2.5, 2, problems=["no rank failed"])], page
    )
    text = page.read_text()
    assert "1 of 2 cases went wrong" in text
    assert "| v-half | 1 / 2 |" in text
    assert "| killed | 2.5 | 2.5 |" in text
    assert text.count("no rank failed") == 1
