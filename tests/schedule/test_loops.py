"""Compiled loops: their code is kept on disk, and nothing that is wrong with the files stops a search."""

import gc
import logging

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

from megatron_pp_ext.compiler.search.tables import draw, generator
from megatron_pp_ext.schedule import loops
from megatron_pp_ext.schedule.loops import Loop, without_collection


def sum_below(end: int) -> int:
    total = 0
    for number in range(end):
        total += number
    return total


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "_folder", lambda source: tmp_path / "code")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    return tmp_path / "code"


def test_code_is_read_from_the_folder_and_compiled_again_where_it_is_damaged(folder):
    assert Loop(sum_below)(5) == 10
    kept = list(folder.rglob("*.nb*"))
    assert kept
    second = Loop(sum_below)
    assert second(5) == 10
    assert sum(second._compiled.stats.cache_hits.values()) == 1
    for path in kept:
        path.write_bytes(path.read_bytes()[:20])
    assert Loop(sum_below)(5) == 10
    assert not folder.exists(), "the next process begins anew"


def test_compiling_is_said_once(folder, caplog):
    """Where there is code in the folder, nothing is compiled."""
    caplog.set_level(logging.INFO)
    for _ in range(2):
        Loop(sum_below)(5)
        assert [record.message for record in caplog.records] == [loops.FIRST_TIME]


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    loop = Loop(sum_below)
    assert loop(5) == 10
    assert loop._compiled.stats.cache_path is None, "another folder may have code of older sources"


@pytest.mark.parametrize(
    "opened",
    [
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o702),
        lambda folder: folder.parent.chmod(0o777),
        lambda folder: folder.symlink_to(folder.rename(folder.with_name("elsewhere"))),
    ],
    ids=["group", "others", "others above it", "link"],
)
def test_code_is_not_read_where_others_may_write_it(opened, folder):
    """Whoever can write the files could have this process run anything."""
    Loop(sum_below)(5)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")}
    assert kept
    assert folder.stat().st_mode & 0o777 == 0o700
    opened(folder)
    loop = Loop(sum_below)
    assert loop(5) == 10
    assert loop._compiled.stats.cache_path is None
    with pytest.raises(ZeroDivisionError):
        Loop(ratio)(0)
    folder.parent.chmod(0o700)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")} == kept, (
        "it is not ours to remove"
    )


def ratio(end: int) -> float:
    return 1 / end


def test_an_error_of_the_loop_itself_is_not_hidden_and_costs_no_code(folder):
    assert Loop(sum_below)(5) == 10
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")}
    with pytest.raises(Exception, match="unicode"):
        Loop(sum_below)("five")
    loop = Loop(ratio)
    assert loop(4) == 0.25
    with pytest.raises(ZeroDivisionError):
        loop(0)
    with pytest.raises(ZeroDivisionError):
        Loop(ratio)(0)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")}.items()


def test_a_disk_without_space_is_no_error(folder, monkeypatch):
    def full(*unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", full)
    assert Loop(sum_below)(5) == 10


def test_other_sources_and_other_processors_have_other_code(monkeypatch, tmp_path):
    """All sources of the package's folder count, since a loop may use numbers and functions of them."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loops, "_PACKAGE", tmp_path)
    room = tmp_path / "planner"
    (room / "search").mkdir(parents=True)
    (room / "step").mkdir()
    loop, numbers = room / "search" / "order_loops.py", room / "step" / "numbers.py"
    loop.write_text("")
    folders = []
    for text in ("", "F = 0", "F = 1"):
        numbers.write_text(text)
        folders.append(loops._folder.__wrapped__(loop))
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")
    folders.append(loops._folder.__wrapped__(loop))
    assert len({*folders}) == 4
    assert {folder.parent for folder in folders} == {tmp_path}


def test_random_numbers_are_the_same_everywhere():
    """The generator's recurrence in Python's own integers, to 64 bits."""
    random, state = generator(7), 7
    for below in (2, 10, 1000, 1 << 30, 1 << 31) * 20:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        assert draw(random, below) == (state >> 33) % below
    assert random.dtype == np.uint64


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_before_even_after_an_error(was_on: bool) -> None:
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ValueError, match="no plan"), without_collection():
            assert not gc.isenabled()
            raise ValueError("no plan")
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
