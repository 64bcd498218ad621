"""What the compiler logs: each search with its sizes."""

import math
import re
from collections.abc import Iterator

import pytest

from megatron_pp_ext import log_lines
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.proposals import ProgressLog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a search logs."""
    lines: list[str] = []
    with log_lines.shown(proposals.__name__, lines.append):
        yield lines


def test_a_search_says_what_it_compiles_and_what_that_took(monkeypatch, tmp_path, said):
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr(proposals, "_PAUSE_SECONDS", math.inf)
    for limits in (3.0, (3.0, 3.0, 4.0)):
        for _ in range(2):  # the second time it is in the cache
            compile_schedule(3, 5, Costs.unit(v(3)), limits, placements=[v(3)], trials=1)
    expected = [
        rf"{word} a schedule for p = 3, m = 5, v placement, {limit}{took}"
        for limit in ("limit 3", "limits from 3 to 4")
        for word, took in (("compiling", ""), ("compiled", r", in \d+\.\d s, \d+\.\d% above its lower bound"))
    ]
    assert len(said) == len(expected)
    assert all(map(re.fullmatch, expected, said)), said


def test_a_long_search_says_now_and_then_how_far_it_is(monkeypatch, said):
    clock = iter((100.0, 105.0, 111.0, 112.0, 121.0, 122.0, 122.5))
    monkeypatch.setattr(proposals.time, "monotonic", lambda: next(clock))
    what = "a schedule for p = 2, m = 4, v placement, limit 1e+10"
    log = ProgressLog(problem_of(v(2), 4, Costs.unit(v(2)), [1e10] * 2), [1e10] * 2, 20.0)
    for makespan in (25.0, 22.0, 21.0, 23.0, 19.9):
        log.record(makespan)
    log.end()
    assert said == [
        f"compiling {what}",
        f"compiling {what}: so far 10.0% above its lower bound after 11 s",
        f"compiling {what}: so far 5.0% above its lower bound after 21 s",
        f"compiled {what}, in 22.5 s, 0.0% above its lower bound",
    ]


def test_a_search_without_a_result_says_so(said: list[str]) -> None:
    ProgressLog(problem_of(v(2), 4, Costs.unit(v(2)), [4.0] * 2), [4.0] * 2, 20.0).end()
    assert said[-1].endswith("s, none found")
