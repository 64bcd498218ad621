"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_seams`` holds them to it.
"""

import os
from collections.abc import Iterator

import pytest

from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.integration import install
from tests.conftest import CACHE
from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

install()

SHORT = 100
"""The trials of a search: training must be right with any schedule, and a good one takes seconds to find."""


@pytest.fixture(autouse=True)
def short_search() -> Iterator[None]:
    """Compile with few trials, and keep these schedules apart from those of a whole search.

    The patch is its own, so that the ``monkeypatch`` of a test ends before the fixtures that it follows.
    """
    whole = proposals.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            proposals, "search", lambda problem, trials, floor: whole(problem, min(trials, SHORT), floor)
        )
        patch.setenv(CACHE, os.path.join(os.environ[CACHE], "short"))
        yield
