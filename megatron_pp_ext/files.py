"""Files that appear whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, in one go: a reader, or a disk that is full, never meets a part of it.

    OSError where it cannot be written; what was there before is there still.
    """
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def require_folder(path: Path) -> None:
    """ValueError where ``path`` cannot be written for want of a folder to hold it, or since it is one."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: no such folder; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it")


def require_writable(flag: str, path: Path) -> None:
    """ValueError, naming ``flag``, where ``path`` is a folder or below something that is none."""
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; give a file in it")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{flag} {path}: {existing} is no folder to write in; give another path")
