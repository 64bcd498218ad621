"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_seams`` holds them to it.
"""

import os
from collections.abc import Iterator

import pytest

from megatron_pp_ext.integration import install
from tests.conftest import CACHE
from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)
from tests.support.few_trials import few_trials

install()


@pytest.fixture(autouse=True)
def short_search() -> Iterator[None]:
    """The patch is its own, so that a test's ``monkeypatch`` ends before the fixtures that it follows."""
    with few_trials(os.path.join(os.environ[CACHE], "short")):
        yield
