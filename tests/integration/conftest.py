"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_seams`` holds them to it.
"""

import os

import pytest

from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.integration import install
from tests.conftest import CACHE
from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

install()

SHORT = 100
"""The trials of a search: training must be right with any schedule, and a good one takes seconds to find."""


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with few trials, and keep these schedules apart from those of a whole search."""
    whole = proposals.search
    monkeypatch.setattr(
        proposals, "search", lambda problem, trials, floor: whole(problem, min(trials, SHORT), floor)
    )
    monkeypatch.setenv(CACHE, os.path.join(os.environ[CACHE], "short"))
