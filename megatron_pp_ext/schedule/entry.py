"""The catalogue's entry for one schedule.  All other code decides by entries, never by a schedule's name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from megatron_pp_ext.schedule.abilities import Abilities
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement, Shape


@dataclass(frozen=True, slots=True)
class Promise:
    """The closed forms of a schedule for p ranks and m microbatches, which tests hold it to.

    They are for unit cost (F, I and W take one tick each, B two, and messages none) and for the
    entry's own ``chunks`` a rank.  ``makespan`` is in ticks.  ``peak`` is the most chunks of
    activations that a rank keeps.  Both are met wherever ``holds``; elsewhere ``peak`` is an upper
    bound and ``makespan`` does not apply.
    """

    makespan: Callable[[int, int], int]
    peak: Callable[[int, int], int]
    holds: Callable[[int, int], bool] = lambda p, m: True


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule of the catalogue.

    ``chunks`` is the number of stages a rank, and with ``more_chunks`` only the fewest and the
    default.  ``make`` takes (ranks, microbatches), 2 or more and 1 or more, and with ``more_chunks`` the
    chunks as a third argument; it raises ValueError for sizes that it has no schedule for.
    ``splits_backward`` is whether any backward comes in two halves, so that weight gradients must be
    deferrable.  ``make_paired`` takes the same arguments as ``make`` and makes the schedule with pairs
    (``Schedule.paired``), which most schedules have no place for.
    """

    name: str
    summary: str
    paper: str
    shape: Shape
    chunks: int
    make: Callable[..., Schedule]
    splits_backward: bool = False
    more_chunks: bool = False
    promise: Promise | None = None
    make_paired: Callable[..., Schedule] | None = None

    @property
    def abilities(self) -> Abilities:
        return _abilities(self.splits_backward, self.make_paired is not None)

    def accepts(self, chunks: int) -> bool:
        """Whether a rank may have this many chunks."""
        return chunks == self.chunks or (self.more_chunks and chunks > self.chunks)

    @property
    def chunks_phrase(self) -> str:
        """The accepted chunks in words: "2", or "2 or more"."""
        return f"{self.chunks} or more" if self.more_chunks else str(self.chunks)

    def placement(self, ranks: int, chunks: int | None = None) -> Placement:
        """Return where the stages live; ValueError where a rank cannot have that many chunks."""
        return Placement(self.shape, ranks, self._accepted(chunks))

    def build(
        self, ranks: int, microbatches: int, chunks: int | None = None, paired: bool = False
    ) -> Schedule:
        """Build the schedule, with pairs if ``paired``, without checking it, which ``catalog.build`` does.

        Raises ValueError for chunks that are not accepted, and for sizes that it cannot be built for.
        """
        chunks = self._accepted(chunks)
        make = self.make_paired if paired else self.make
        assert make is not None
        require_pipeline(self.name, ranks, microbatches)
        return make(ranks, microbatches, *([chunks] if self.more_chunks else []))

    def _accepted(self, chunks: int | None) -> int:
        if chunks is None:
            return self.chunks
        if not self.accepts(chunks):
            other = "interleaved" if chunks > self.chunks else "1f1b"
            raise ValueError(
                f"{self.name} got {chunks} chunk(s) a rank, but has {self.chunks_phrase}: leave chunks out, "
                f"or use {other}"
            )
        return chunks


def require_pipeline(name: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError unless there are at least 2 ranks and 1 microbatch, without which no schedule is."""
    if ranks < 2:
        raise ValueError(f"{name} got {ranks} rank(s), but a pipeline has at least 2: add ranks")
    if microbatches < 1:
        raise ValueError(f"{name} got {microbatches} microbatches, but a step has at least 1: add some")


@cache
def _abilities(splits_backward: bool, has_pairs: bool) -> Abilities:
    """Make each only once, since a search asks for every candidate."""
    return Abilities(splits_backward, has_pairs)
