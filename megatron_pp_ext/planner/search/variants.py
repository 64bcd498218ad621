"""What features offer to a search: other ways to run a candidate that memory keeps out.

A feature has ``Variants`` (``Feature.variants``).  A candidate that they have changed has their ``Choice``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job

if TYPE_CHECKING:
    from megatron_pp_ext.planner.search.candidate import Candidate
    from megatron_pp_ext.planner.search.replays import Evaluated, Replays


@dataclass(frozen=True, slots=True)
class Choice:
    """What a feature has chosen for a candidate.

    ``word`` is part of the candidate's name.  ``arguments`` are those of Megatron that it sets, as pairs of a
    name and a value, and ``record`` has its entries in a JSON file, by ``Variants.entries``.
    """

    word: str
    arguments: tuple[tuple[str, Any], ...]
    record: tuple[tuple[str, Any], ...]


class Variants:
    """What one feature offers to a search.

    ``arguments`` and ``entries`` are the names in its choices.  ``label`` is the word of a choice, with what
    it stands for.
    """

    arguments: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    label: tuple[str, str] = ("", "")

    def refuse(self, asked: RequestedJob) -> None:
        """Raise ValueError, in one line, for flags that choose what a search has to choose."""

    def are_tried(self, job: Job) -> bool:
        """Whether a search for ``job`` tries them; the largest stage of a rank is then all that it keeps."""
        return False

    def replayed(
        self, replays: "Replays", candidate: "Candidate", limit: float, room: Callable[[float], float]
    ) -> "Evaluated | None":
        """Return a variant of ``candidate`` that fits; None if there is none.  See ``Replays.replayed``."""
        return None


def offered() -> list[Variants]:
    """Return what all features offer."""
    return list(filter(None, (feature.variants() for feature in FEATURES)))


def tried(job: Job) -> tuple[Variants, ...]:
    """Return those that a search for ``job`` tries."""
    return tuple(variants for variants in offered() if variants.are_tried(job))


def arguments() -> Iterator[str]:
    """Yield the arguments of Megatron that choices set."""
    for variants in offered():
        yield from variants.arguments


def entries() -> Iterator[str]:
    """Yield the entries of choices in a JSON file."""
    for variants in offered():
        yield from variants.entries
