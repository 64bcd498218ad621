"""One of the processes that share a cache compiles, and none waits longer for it than it would compile."""

import errno
import fcntl
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from megatron_pp_ext.compiler import cache
from megatron_pp_ext.compiler import compile as compiler
from megatron_pp_ext.compiler.limits import Budget
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import v

COSTS = Costs.unit(v(2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with few trials: any schedule will do."""
    whole = proposals.search
    monkeypatch.setattr(
        proposals, "search", lambda problem, _, floor, starts: whole(problem, 2, floor, starts)
    )


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of those that compiled."""
    seen: list[int] = []
    search = compiler._shortest

    def watched(*args, **kwargs):
        seen.append(os.getpid())
        return search(*args, **kwargs)

    monkeypatch.setattr(compiler, "_shortest", watched)
    return seen


def compiled(microbatches: int = 4) -> Schedule:
    request = Request("flex", (v(2),), microbatches, True, limit=Budget((2.0, 2.0)))
    return make(request, CostModel.fixed(COSTS)).schedule


@pytest.fixture
def held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All locks are held by somebody who never lets go, as for a machine that died."""
    compiled(3)  # makes the folder
    held = []

    def hold(name: str) -> Path:
        path = folder / f"{name}.lock"
        lock = FileLock(path, is_singleton=False)
        lock.acquire()
        held.append(lock)
        return path

    names = cache.key

    def key(inputs: object) -> str:
        hold(name := names(inputs))
        return name

    monkeypatch.setattr(cache, "key", key)
    monkeypatch.setattr(cache, "LONGEST_WAIT", 0.2)
    yield
    for lock in held:
        lock.release()


def test_nobody_waits_for_ever(held, compilations: list[int], capsys: pytest.CaptureFixture) -> None:
    assert compiled().microbatches == 4
    assert len(compilations) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "was locked by another process for 0.2 s; the schedule is compiled without waiting" in line


def test_what_is_in_the_cache_needs_no_lock(held, compilations, capsys):
    assert compiled(3).microbatches == 3
    assert (compilations, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks(error, folder, compilations, monkeypatch, capsys):
    """Even where an unfinished job has left what marks a lock on such file systems."""

    def flock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(cache, "LONGEST_WAIT", 0.2)
    assert compiled().microbatches == 4
    assert len(compilations) == 1
    assert len(capsys.readouterr().err.splitlines()) <= 1
    assert compiled().microbatches == 4
    assert len(compilations) == 1  # it was kept


@pytest.mark.parametrize("where", ["a file", "below a file", "read-only"])
def test_no_folder_to_keep_schedules_in(where, tmp_path, compilations, monkeypatch, capsys):
    there = tmp_path / "cache"
    if where == "read-only":
        # Root may write anywhere but here.
        there = Path("/proc/megatron_pp_ext")
    else:
        there.write_text("")
        there = there / "deeper" if where == "below a file" else there
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(there))
    for local_rank in "01":
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert compiled().microbatches == 4
    assert len(compilations) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be locked (" in line
    assert str(there) in line


def test_a_full_disk(folder: Path, compilations: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def write_whole(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "write_whole", write_whole)
    assert compiled() == compiled()
    assert len(compilations) == 2
    assert not list(folder.glob("*.json"))


def test_a_filled_cache_that_is_read_only(folder, compilations, monkeypatch, capsys):
    """As an administrator may prepare it: it is read, without a lock and without a word."""
    compiled()
    monkeypatch.setattr(cache, "FileLock", None)
    assert compiled().microbatches == 4
    assert (len(compilations), capsys.readouterr().err) == (1, "")


def searches(_: int) -> tuple[str, int]:
    """Compile what other processes compile; return the digest and how often this process searched."""
    searched = []
    search = compiler._shortest

    def watched(*args, **kwargs):
        searched.append(os.getpid())
        return search(*args, **kwargs)

    compiler._shortest = watched
    return compiled().digest, len(searched)


def test_one_of_those_who_compile_at_once_searches(folder: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4, maxtasksperchild=1) as pool:
        found = pool.map(searches, range(4), chunksize=1)
    assert len({digest for digest, _ in found}) == 1
    assert sum(searched for _, searched in found) == 1


def test_different_schedules_do_not_wait_for_each_other(folder, monkeypatch):
    """While one job compiles for an hour, another one compiles something else."""
    compiled()
    (lock,) = folder.glob("*.lock")
    monkeypatch.setattr(cache, "LONGEST_WAIT", 3600.0)
    with FileLock(lock, is_singleton=False):
        assert compiled(5).microbatches == 5
