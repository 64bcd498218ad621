"""Files that appear whole or not at all, texts that a person may have written, and the user's own folder."""

import atexit
import errno
import functools
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEXT = "utf-8-sig"
"""The encoding of texts that a person may have written: UTF-8, in which a byte order mark is no letter."""


LARGEST = 2**26
"""The most bytes of a file that is read where no other limit is given: twice as many as any tokenizer has."""


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of the regular file ``path``, or of the one that a link there leads to.

    Raises OSError, naming ``path``, for a pipe or a device, which may never end, and for more than
    ``largest`` bytes, which could fill the memory.
    """
    # Opening a pipe waits for a writer, unless it is asked not to.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "a pipe or a device, which may have no end: give a file", str(path))
        if about.st_size > largest:
            size = f"{about.st_size:,} bytes, but at most {largest:,} are read: give a smaller file"
            raise OSError(errno.EFBIG, size, str(path))
        return file.read(largest)


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text in ``path``; UnicodeDecodeError if it is not UTF-8, OSError as from ``read_bytes``."""
    return read_bytes(path, largest).decode(TEXT)


def user_folder() -> Path:
    """Return the folder of this user's caches, in XDG_CACHE_HOME or the home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_pp_ext"


def make_private(folder: Path) -> None:
    """Make ``folder``, in which only this user can write.

    Raises OSError if it cannot be made, and if somebody else may write in it or could put another one in its
    place: a folder above it that others may write must be sticky, as /tmp is.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder, *folder.resolve().parents):
        about = place.lstat()
        is_ours = about.st_uid == os.geteuid()
        is_open = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if place == folder:
            is_safe = stat.S_ISDIR(about.st_mode) and is_ours and not is_open
        else:
            is_fixed = not is_open & stat.S_IWOTH or bool(about.st_mode & stat.S_ISVTX)
            is_safe = (is_ours or about.st_uid == 0) and is_fixed
        if not is_safe:
            raise PermissionError(errno.EPERM, "others than its owner may write there", str(place))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a place for a file that appears at ``path`` when the context ends, as a whole or not at all.

    The place is in a folder of its own next to ``path``, whose name nobody can foresee and in which nobody
    else can write; it is gone at the end.  The file's mode is the one that ``open`` would have given it.
    What is no ordinary file, such as /dev/stdout, a pipe or a link, is written in its place.

    Raises OSError, naming ``path``, if it cannot be written; the file that was there before is then still
    there.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        try:
            yield path
        except OSError as error:
            error.filename = error.filename or str(path)  # a write by itself does not name its file
            raise
        return
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    with scratch as folder:
        unfinished = Path(folder, path.name)
        try:
            yield unfinished
            if path.exists():
                unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
            os.replace(unfinished, path)
        except OSError as error:
            if error.filename is None or Path(error.filename) == unfinished:
                error.filename, error.filename2 = str(path), None
            raise


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as ``whole`` does: no reader sees a part of it, even if the disk is full."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Write ``content`` to ``path`` as JSON that a person can read."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


_unwritten: dict[Path, str] = {}
"""Why the last attempt to write a file failed, of those without which training goes on."""


@contextmanager
def going_on_without(path: Path) -> Iterator[None]:
    """Let training go on where ``path`` cannot be written within the context.

    One line is printed at the first failure, which much of the log may follow, and one at the end of the
    process if the last attempt failed as well.
    """
    try:
        yield
    except OSError as error:
        reason = _unwritten[path] = str(error.strerror or error)
        _print_once(f"megatron_pp_ext: {path} cannot be written ({reason}); training goes on")
    else:
        _unwritten.pop(path, None)


@atexit.register
def say_what_is_missing() -> None:
    """Print a line for each file that was not written; registered for the end of the process."""
    for path, reason in _unwritten.items():
        state = "is of an earlier step or run" if os.path.lexists(path) else "is missing"
        print(f"megatron_pp_ext: {path} {state}: it could not be written ({reason})", flush=True)


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)


def require_folder(*paths: Path | None) -> None:
    """Raise ValueError for a folder among ``paths``, and for one without a folder to hold it; skip None."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: no such folder; make it first")
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give a file in it")


def require_writable(flag: str, path: Path) -> None:
    """Raise ValueError, naming ``flag``, if ``path`` is a folder or if nothing can be written there."""
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; give a file in it")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{flag} {path}: {existing} is no folder to write in; give another path")
