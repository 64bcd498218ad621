"""What features offer to a search: other ways to run a candidate that memory keeps out.

A feature registers ``Variants`` (``features.searches``).  A candidate that it has changed has its ``Choice``.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.registered import Registered

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


_registered = Registered[Variants]()


def register(variants: Variants) -> None:
    """Let ``variants`` be tried by every search from now on."""
    _registered.add(variants)


def registered() -> Iterable[Variants]:
    """Return what is registered."""
    return _registered


def tried(job: Job) -> tuple[Variants, ...]:
    """Return those that a search for ``job`` tries."""
    return tuple(one for one in _registered if one.are_tried(job))


def arguments() -> Iterator[str]:
    """Yield the arguments of Megatron that choices set."""
    for one in _registered:
        yield from one.arguments


def entries() -> Iterator[str]:
    """Yield the entries of choices in a JSON file."""
    for one in _registered:
        yield from one.entries
