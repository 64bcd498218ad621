"""Compiled schedules on disk: the order as CSV, the rest as JSON, named by a digest of the inputs.

No file is trusted: one that is missing, cut off, of another version or without the digest that it should
have counts as absent, and the schedule is compiled again.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.names import FLEX


def directory() -> Path:
    """Return the folder of compiled schedules: MEGATRON_PP_EXT_CACHE, or one in the user's XDG cache."""
    if own := os.environ.get("MEGATRON_PP_EXT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_pp_ext" / "schedules"


def key(inputs: Any) -> str:
    """Return the digest of ``inputs``, which must be serializable as JSON."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str) -> tuple[Schedule, dict[str, Any]] | None:
    """Return the schedule and notes stored under ``name``, or None."""
    at = directory() / name
    try:
        notes = json.loads(at.with_suffix(".json").read_text(encoding="utf-8"))
        schedule = replace(csv_file.read(at.with_suffix(".csv")), name=FLEX)
    except (OSError, ValueError):
        return None
    if not isinstance(notes, dict) or notes.get("digest") != schedule.digest:
        return None
    return schedule, notes


def store(name: str, schedule: Schedule, notes: dict[str, Any]) -> None:
    """Store ``schedule`` and ``notes`` under ``name``; a folder that cannot be written is no error.

    Each file appears whole or not at all, and the notes, without which nothing is read, come last.
    """
    folder = directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            rows, about = Path(scratch, "rows"), Path(scratch, "notes")
            csv_file.write(schedule, rows)
            about.write_text(json.dumps(notes | {"digest": schedule.digest}) + "\n", encoding="utf-8")
            os.replace(rows, folder / f"{name}.csv")
            os.replace(about, folder / f"{name}.json")
    except OSError:
        return
