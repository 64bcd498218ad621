"""What has to hold before any test imports torch. Torch itself is left to the tests that need it."""

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Ranks share the cores of the test machine. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

CACHE = "MEGATRON_PP_EXT_CACHE"
"""The folder of compiled schedules: all workers share one, and none reads what was compiled before."""


def pytest_configure(config: pytest.Config) -> None:
    """Make that folder, and let no property-based test fail for the time that it takes."""
    if not hasattr(config, "workerinput"):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="compiled-")
    if config.pluginmanager.has_plugin("hypothesispytest"):  # a machine for GPU tests may lack hypothesis
        from hypothesis import HealthCheck, settings

        settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Keep what all tests import out of collections, which would go through half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder at the end, and let extensions free what they count."""
    gc.unfreeze()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled in other tests must not answer for this one."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.fixture
def short_searches(tmp_path: Path) -> Iterator[None]:
    """For tests of what any compiled schedule shows: short searches, without what was compiled before."""
    from tests.support.few_trials import few_trials  # it imports this module

    with few_trials(str(tmp_path / "short")):
        yield


@pytest.fixture(scope="session")
def asking_process() -> Iterator[Callable[[], Any]]:
    """Return a function that starts one process for all questions to Megatron, and returns it."""
    from megatron_pp_ext.job import ask_megatron

    start, end, processes = ask_megatron._start, ask_megatron._end, []

    def process() -> Any:
        if not processes:
            processes.append(start())
        return processes[0]

    yield process
    for each in processes:
        end(each)


@pytest.fixture
def shared_megatron(asking_process: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process ask Megatron without importing it for each question."""
    from megatron_pp_ext.job import ask_megatron

    monkeypatch.setattr(ask_megatron, "_start", asking_process)
    monkeypatch.setattr(ask_megatron, "_end", lambda process: None)
