"""Schedules compiled with few trials: training has to be right with any, and a good one takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v
from tests.conftest import CACHE

TRIALS = 10


@contextmanager
def few_trials(folder: str) -> Iterator[None]:
    """Compile so inside, and keep these schedules in ``folder``, apart from the ones of a whole search."""
    _loops_are_compiled()
    whole = proposals.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proposals,
            "search",
            lambda problem, trials, floor, starts: whole(problem, min(trials, TRIALS), floor, starts),
        )
        patch.setenv(CACHE, folder)
        yield


@cache
def _loops_are_compiled() -> None:
    """Have the code of a search's loops in this process: no rank that is forked from it compiles them."""
    compile_schedule(4, 8, Costs.unit(v(4)), 5.0, trials=TRIALS)
