"""The commits of Megatron on which the hooks were tried, and the parameters that they have in each place.

``signatures.json`` is written by ``scripts/tried_commits.py``.  Its ``commits`` are listed by name, with the
repository, the date, the version in the source, and whose pin a commit is.  Each of its ``places`` has the
parameters of a function, as text as in ``places``, and its ``commits``, where those are not all of
Megatron's.  A commit without a row for a place lacks it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that was tried.  As text it names the repository and the commit."""

    name: str
    repository: str
    commit: str
    date: str
    version: str
    pinned_by: str
    """The frameworks that pin the commit in images or submodules; empty where it is a release."""
    patch: str = ""
    """Its user's changes to it, in words."""

    @property
    def is_megatron(self) -> bool:
        """Whether it is one of Megatron's, and not one of a framework that is hooked."""
        return self.repository.endswith("/Megatron-LM")

    def __str__(self) -> str:
        origin = f"{self.repository} {self.commit}".strip()
        patch = f" with {self.patch}" if self.patch else ""
        return f"{self.name} ({origin}{patch}, {self.date})"


@cache
def _read() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


@cache
def commits() -> tuple[Commit, ...]:
    """Return every commit of the table, the oldest first, those of frameworks too."""
    rows = [Commit(name=name, **row) for name, row in _read()["commits"].items()]
    return tuple(sorted(rows, key=lambda row: row.date))


@cache
def signatures(name: str) -> Mapping[str, str]:
    """Return the parameters by place of the commit that is called ``name``."""
    all_names = [commit.name for commit in commits() if commit.is_megatron]
    rows = _read()["places"]
    return {row["place"]: row["parameters"] for row in rows if name in row.get("commits", all_names)}


def agreeing(parameters: Mapping[str, str | None]) -> list[Commit]:
    """Return Megatron's commits that have ``parameters`` (by place), of those that the table lists."""
    return [commit for commit in commits() if commit.is_megatron and _differing(commit, parameters) == 0]


def nearest(parameters: Mapping[str, str | None]) -> Commit:
    """Return Megatron's commit that differs from ``parameters`` in the fewest places, the newest."""
    newest_first = [commit for commit in reversed(commits()) if commit.is_megatron]
    return min(newest_first, key=lambda commit: _differing(commit, parameters))


def _differing(commit: Commit, found_parameters: Mapping[str, str | None]) -> int:
    accepted, places = signatures(commit.name), {row["place"] for row in _read()["places"]}
    return sum(
        accepted.get(place) != parameters for place, parameters in found_parameters.items() if place in places
    )
