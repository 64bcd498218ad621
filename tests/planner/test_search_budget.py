"""A search that may not go to its end: it keeps the best so far, and says what it has not looked at."""

import pytest

from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.result import Compiles, SearchBudget
from tests.planner.test_configuration_search import A100, space

LIMIT = 60e9


class Clock:
    """Goes on by a second each time that somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def search(**options) -> Search:
    return Search(space(), A100, LIMIT, top=50, **options)


def interrupted_at(number: int, phase: str = "replaying"):
    def progress(what: str, done: int, total: int) -> None:
        if (what, done) == (phase, number):
            raise KeyboardInterrupt

    return progress


@pytest.fixture(scope="module")
def whole():
    return search().run()


def test_a_search_without_a_limit_goes_to_its_end(whole):
    assert whole.stopped is None


def test_a_spent_budget_ends_the_search_with_the_best_so_far(whole):
    found = search(budget=SearchBudget(20, Clock())).run()
    assert found.best and len(found.best) < len(whole.best)
    assert "stopped after the 20 s of a processor that --cpu-seconds allows" in str(found.stopped)
    # What was not looked at has no shorter step than reported.
    unseen = [one.estimate.step_seconds for one in whole.best if one not in found.best]
    assert min(unseen) >= found.stopped.least_seconds
    assert found.stopped.remaining > len(unseen) / 2


def test_some_of_the_budget_is_left_to_compile():
    found = search(budget=SearchBudget(20, Clock()), compiles=Compiles.TOO).run()
    assert found.stopped.remaining
    assert any(one.candidate.schedule == "flex" for one in found.named)


def test_an_interrupted_search_returns_the_best_so_far(whole):
    found = search().run(interrupted_at(20))
    assert found.best and found.replayed <= 20
    assert str(found.stopped).startswith("interrupted; ")
    in_between = search(compiles=Compiles.TOO).run(interrupted_at(1, "compiling"))
    assert str(in_between.stopped) == "interrupted; not all orders were compiled"


@pytest.mark.parametrize("phase", ["bounding", "replaying"])
def test_an_interrupted_search_without_a_result_is_interrupted(phase):
    with pytest.raises(KeyboardInterrupt):
        search().run(interrupted_at(0, phase))


def test_a_budget_in_which_nothing_is_found_is_an_error_with_what_to_do():
    with pytest.raises(ValueError, match=r"nothing that fits was found: stopped .* give more --cpu-seconds"):
        search(budget=SearchBudget(0.4, Clock())).run()
