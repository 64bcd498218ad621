"""Spans: work of a rank apart from its actions, as recorded and shown in a trace (copies, all-to-alls)."""

from typing import NamedTuple


class Label(NamedTuple):
    """A span's description: its ``category``, which a feature chooses, its ``name``, and more ``about`` it.

    Spans with a ``track`` are shown in a row of that name, where none overlaps another of its rank.  Others
    are shown with the actions, which they may overlap.
    """

    category: str
    name: str
    track: str = ""
    about: tuple[tuple[str, int | str], ...] = ()


class Span(NamedTuple):
    """The work that ``label`` describes, from ``start`` to ``end``, in seconds."""

    label: Label
    start: float
    end: float
