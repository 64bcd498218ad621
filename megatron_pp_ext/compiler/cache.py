"""Compiled schedules on disk.  Of the ranks of a machine one compiles, and the others read its result."""

import hashlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
from itertools import batched
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron_pp_ext.files import read_text, user_folder, write_whole
from megatron_pp_ext.schedule.actions import Action, Copies, Kind, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Placement

Lock = Callable[[str], AbstractContextManager[object]]
"""Returns the context in which the schedule of this name in the cache is compiled, maybe one at a time."""


def directory() -> Path:
    """Return the folder of compiled schedules: MEGATRON_PP_EXT_CACHE, or one in the user's XDG cache."""
    if folder := os.environ.get("MEGATRON_PP_EXT_CACHE"):
        return Path(folder)
    return user_folder() / "schedules"


def key(inputs: Any) -> str:
    """Return the digest of ``inputs``, which must be serializable as JSON."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def spelled(placement: Placement, costs: Costs) -> list[object]:
    """Return the inputs in a form, for ``key``, that is equal exactly when they are."""
    stages = [[float(value).hex() for value in astuple(stage)] for stage in costs.stages]
    shared = [float(value).hex() for value in costs.of_all_stages]
    return [placement.shape.value, placement.ranks, placement.chunks, *shared, stages]


def in_cache[Result](
    name: str, lock: Lock, read: Callable[[], Result | None], compile: Callable[[], Result]
) -> Result:
    """Return the result of ``read`` for ``name``, or lock and ``compile``, which also stores it."""
    stored = read()
    if stored is None:
        with lock(name):
            stored = read()  # somebody may have compiled it meanwhile
            if stored is None:
                stored = compile()
    return stored


def load(name: str) -> tuple[Schedule, str] | None:
    """Return the schedule stored under ``name`` and its origin, or None, whatever is wrong with the files.

    No file is trusted: one that is missing, cut off, of another version or without the digest that it should
    have counts as absent, and so does anything that is no file.  The schedule is then compiled again, and
    takes the place of the old one.
    """
    rows, about = _files(name)
    try:
        notes = json.loads(read_text(about))
        schedule = replace(csv_file.read(rows), name=FLEX, copies=_copies(notes["copies"]))
        if schedule.copies:  # the order is checked where it is read
            check(schedule)
        if (notes["key"], notes["digest"]) != (name, schedule.digest):
            return None
        return schedule, str(notes["origin"])
    except Exception:  # every kind of damage has an error of its own, and none of them is the user's
        return None


def store(name: str, schedule: Schedule, origin: str) -> None:
    """Store ``schedule`` under ``name`` with its ``origin``; a folder that cannot be written is no error.

    The order is a csv file; the notes have the copies to the host and the origin.  Each file appears whole or
    not at all, and the notes, without which nothing is read, come last.
    """
    rows, about = _files(name)
    reloads, frees = schedule.copies.reloads, schedule.copies.frees
    copies = [[*unit, *reloads[unit], *frees.get(unit, ())] for unit in sorted(reloads)]
    notes = {"key": name, "digest": schedule.digest, "origin": origin, "copies": copies}
    try:
        rows.parent.mkdir(parents=True, exist_ok=True)
        for path in (rows, about):
            _make_way(path)
        csv_file.write(schedule, rows)
        write_whole(about, json.dumps(notes) + "\n")
    except OSError:
        return


def _files(name: str) -> tuple[Path, Path]:
    return directory() / f"{name}.csv", directory() / f"{name}.json"


def _copies(rows: list[list[Any]]) -> Copies:
    """Return the copies of rows: stage, microbatch, and the actions before which it is reloaded and freed."""
    actions = {
        (stage, of): [Action(at, Kind(kind), number) for at, kind, number in batched(rest, 3)]
        for stage, of, *rest in rows
    }
    return Copies(
        {unit: reload for unit, (reload, *_) in actions.items()},
        {unit: free for unit, (_, *frees) in actions.items() for free in frees},
    )


def _make_way(path: Path) -> None:
    """Remove anything at ``path`` that is no file: a link, a pipe or an empty folder."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        path.unlink()


LONGEST_WAIT = 60.0
"""The seconds that a rank waits while another one compiles; then it compiles, too.

On a free core, schedules for up to 64 ranks and 512 microbatches take less (docs/compiler.md).
"""


@contextmanager
def in_turn(name: str) -> Iterator[None]:
    """Wait until no other process compiles the schedule ``name`` of the cache, or for ``LONGEST_WAIT``.

    Who cannot wait compiles at the same time as the others, since all get the same schedule: where there is
    no place to keep schedules, on file systems without locks, and where the owner of a lock has died on
    another machine.
    """
    lock = FileLock(directory() / f"{name}.lock", timeout=LONGEST_WAIT)
    problem = ""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = f"{lock.lock_file} was locked by another process for {LONGEST_WAIT:g} s"
    except (OSError, NotImplementedError) as error:  # the latter is filelock's where there is no flock
        problem = f"{lock.lock_file} cannot be locked ({getattr(error, 'strerror', None) or error})"
    log = logging.getLogger("megatron_pp_ext.compiler")
    level = log.level
    if problem and os.environ.get("LOCAL_RANK", "0") != "0":
        log.setLevel(logging.WARNING)  # all ranks would log the same
    elif problem:
        print(
            f"megatron_pp_ext: {problem}; the schedule is compiled without waiting for others",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        log.setLevel(level)
        lock.release()
