"""Schedules compiled with few trials: training has to be right with any, and a good one takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_pp_ext.compiler.search import proposals
from tests.conftest import CACHE

TRIALS = 30


@contextmanager
def few_trials(folder: str) -> Iterator[None]:
    """Compile so inside, and keep these schedules in ``folder``, apart from those of a whole search."""
    whole = proposals.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proposals,
            "search",
            lambda problem, trials, floor, starts: whole(problem, min(trials, TRIALS), floor, starts),
        )
        patch.setenv(CACHE, folder)
        yield
