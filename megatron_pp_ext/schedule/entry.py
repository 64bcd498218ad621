"""The catalogue's entry for one schedule, its abilities, and the names of schedules without an entry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement, Shape


@dataclass(frozen=True, slots=True)
class Abilities:
    """Properties of a schedule that its order alone does not show."""

    splits_backward: bool = False
    """Whether any backward may come in two halves, so that weight gradients must be deferrable."""
    has_pairs: bool = False
    """Whether there may be an order in which a forward and a backward run as a pair."""
    is_compiled: bool = False
    """Whether the order is searched for, by costs and within a limit of memory."""
    takes_limit: bool = False
    """Whether whoever asks for the schedule sets that limit."""
    measures_memory: bool = False
    """Whether the memory that the devices have free is that limit, which only training can measure."""
    flushes: bool = True
    """Whether a step leaves no microbatch in flight; else a stage updates as its own backwards come in."""
    has_two_versions: bool = False
    """Whether a stage that does not flush keeps two versions of its weights at most."""
    order: str | None = None
    """The catalogue's schedule whose order this one repeats without end, where it does not flush."""
    file: Path | None = None
    """The file that the schedule is read from."""


FORWARD_ONLY = "forward-only"
"""The order of an evaluation, whichever schedule trains; no flag requests it."""

NO_PIPELINE = "none"
"""The order of a single rank, which runs one microbatch after the other; no flag requests it."""

FLEX = "flex"
"""The schedule that is compiled for given costs and a memory limit."""

AUTO = "auto"
"""``FLEX`` within the memory that the devices have free, which only training can measure."""

CSV_PREFIX = "csv:"
"""The prefix of a schedule that is read from a file; the path follows it."""

PIPEDREAM, TWO_VERSIONS = "pipedream", "pipedream-2bw"
"""1F1B's order without an end: a stage updates its weights as its own backwards come in."""


class Other(NamedTuple):
    """A name outside the catalogue, in the words of the table that ``mpp list`` prints."""

    name: str
    summary: str
    placement: str
    chunks: str
    source: str
    abilities: Abilities


OTHERS = (
    Other(
        FLEX,
        "the shortest found for your costs within a memory limit",
        "any",
        "1 or more",
        "mpp schedule flex",
        Abilities(splits_backward=True, has_pairs=True, is_compiled=True, takes_limit=True),
    ),
    Other(
        AUTO,
        "flex, within the memory that the devices have free; in training only",
        "any",
        "1 or more",
        "",
        Abilities(splits_backward=True, is_compiled=True, measures_memory=True),
    ),
    Other(
        f"{CSV_PREFIX}FILE",
        "your own, from a file",
        "any",
        "1 or more",
        "mpp schedule NAME --csv FILE",
        Abilities(has_pairs=True),
    ),
    Other(
        PIPEDREAM,
        "1f1b that never flushes; an update every few microbatches; in training only",
        "linear",
        "1",
        "SOSP 2019, figure 4",
        Abilities(flushes=False, order="1f1b"),
    ),
    Other(
        TWO_VERSIONS,
        "the same with two weight versions at most; in training only",
        "linear",
        "1",
        "arXiv 2006.09503, section 3.1",
        Abilities(flushes=False, has_two_versions=True, order="1f1b"),
    ),
)
"""The names that ``--pipeline-schedule`` accepts in addition to those of the catalogue."""

ALIASES = {
    # arXiv 2401.10241 and its fork of Megatron-LM
    "zb1p": "zb-h1",
    "zb2p": "zb-h2",
    "zbv": "v-zb",
    # torch.distributed.pipelining
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "loopedbfs": "breadth-first",
    "zbvzerobubble": "v-zb",
    "dualpipev": "dualpipe-v",
    # AMD Primus
    "1f1b-interleaved": "interleaved",
    "zero-bubble": "zb-h1",
    "zbv-formatted": "v-zb",
    "zbv-greedy-half": "v-half",
    "zbv-greedy-min": "v-min",
}
"""The names that other projects give to schedules of the catalogue."""

NOT_HERE = {
    FLEX: "it is compiled for costs and a memory limit, in Python by compile_schedule, and by mpp schedule "
    f"{FLEX} --memory-limit 0.5",
    AUTO: f"it is {FLEX} within the memory that the devices have free, which only training can measure; look "
    f"at {FLEX} with --memory-limit, and train with --pipeline-schedule {AUTO}",
    PIPEDREAM: "it runs 1f1b over the whole training without an end, so it has no makespan; look at 1f1b "
    "with many microbatches, let mpp estimate tell its pace, and train with --pipeline-schedule "
    f"{PIPEDREAM}",
    TWO_VERSIONS: f"it runs in the order of {PIPEDREAM}, which is 1f1b's; look at 1f1b with many "
    f"microbatches, and train with --pipeline-schedule {TWO_VERSIONS}",
    "dualpipe": "it keeps two copies of all weights; use dualpipe-v, which overlaps alike with one copy",
    "seq1f1b": "it cuts the sequence into parts that depend on each other, which no order of "
    "microbatches can say; to save memory use v-half or v-min",
    "group-interleaved": "it orders 1f1b for copying activations to the host, which is not done here; "
    "to save memory use v-half or v-min",
}
"""Why the catalogue lacks schedules: they are compiled, need training, or are another project's."""


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
