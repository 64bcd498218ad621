"""What a rank does apart from its actions, as recorded and shown in a trace: copies, exchanges of tokens."""

from typing import NamedTuple


class Label(NamedTuple):
    """What a span is: its ``category``, which a feature chooses, its ``name``, and more ``about`` it.

    Spans with a ``track`` are shown in a row of that name, where none overlaps another of its rank.  Others
    are shown with the actions, which they may overlap.
    """

    category: str
    name: str
    track: str = ""
    about: tuple[tuple[str, int | str], ...] = ()


class Span(NamedTuple):
    """What ``label`` says took from ``start`` to ``end``, in seconds."""

    label: Label
    start: float
    end: float
