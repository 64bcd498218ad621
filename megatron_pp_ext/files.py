"""Files that appear whole or not at all."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as a whole: no reader sees a part of it, even if the disk is full.

    Raises OSError if it cannot be written; the file that was there before is then still there.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def going_on_without(path: Path) -> Iterator[None]:
    """Let training go on where ``path`` cannot be written within the context; one line is printed, once."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        _print_once(f"megatron_pp_ext: {path} cannot be written ({reason}); training goes on")


@functools.cache
def _print_once(line: str) -> None:
    print(line, flush=True)


def require_folder(path: Path) -> None:
    """Raise ValueError if ``path`` is a folder, or if there is no folder to hold it."""
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
