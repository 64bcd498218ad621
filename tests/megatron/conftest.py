"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_hooks`` holds them to it.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from megatron_pp_ext.launch import install
from tests.conftest import CACHE
from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)
from tests.support.few_trials import few_trials

install()


@pytest.fixture(autouse=True, scope="module")
def short_search() -> Iterator[None]:
    """Jobs that the tests of a module share compile with few trials, too."""
    with few_trials(os.path.join(os.environ[CACHE], "short")):
        yield


@pytest.fixture
def said_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[ModuleType], Path]:
    """Return the file for the lines that a module of this package lets rank 0 print in a job."""

    def keep(module: ModuleType) -> Path:
        file = tmp_path / "said"
        file.touch()

        def print_rank_0(text: str) -> None:
            if dist.get_rank() == 0:
                with file.open("a") as lines:
                    lines.write(f"{text}\n")

        monkeypatch.setattr(module, "print_rank_0", print_rank_0)
        return file

    return keep
