"""Placements: which rank holds which stages of the model.

A model is cut into ``stages`` in model order, 0 .. ranks * chunks - 1.  A rank holds
``chunks`` of them; its chunk number c counts them in model order.  A placement is the map between
a stage and its (rank, chunk).

Four shapes are in use.  They differ in where the pipeline goes when it reaches the last rank:

``linear``  one chunk a rank; stage i on rank i.
``loop``    jumps back to rank 0 and runs down again (Megatron's interleaved schedule,
            arXiv 2104.04473, figure 4).
``v``       turns round on the spot, two chunks a rank, so that rank 0 holds the first and the
            last stage (controllable-memory schedules, arXiv 2405.15362, section 3).
``wave``    turns round at every end, any number of chunks: the V repeated.

A V, and a wave of an even number of chunks, has the embedding and the output head on one rank.  That is rank
0 in the papers; such a placement may be turned over, so that it is the last one (``Placement.ends_on_last``).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

FIRST, LAST = "first", "last"
"""The ranks that may have the embedding and the output head."""


class Shape(StrEnum):
    """The stage that follows the one on the last rank; see the module's docstring."""

    LINEAR = "linear"
    LOOP = "loop"
    V = "v"
    WAVE = "wave"


@dataclass(frozen=True, slots=True)
class Placement:
    """The map between stages and ranks.

    ``ranks`` is the pipeline-parallel size p, ``chunks`` the number of stages a rank holds.  With
    ``splits_head`` every rank holds an equal part of the output layer, the head, and does an S and a T of it
    for every microbatch; else the last stage holds it.  With ``ends_on_last`` the ranks count from the other
    end: rank r holds what rank p - 1 - r holds without, so that the embedding and the output head are on the
    last rank.

    Raises ValueError where the shape cannot have that many chunks, or has no rank with both.
    """

    shape: Shape
    ranks: int
    chunks: int = 1
    splits_head: bool = False
    ends_on_last: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a pipeline needs at least 1 rank, got {self.ranks}")
        if self.chunks < 1:
            raise ValueError(f"a rank needs at least 1 chunk, got {self.chunks}")
        chunks = {Shape.LINEAR: 1, Shape.V: 2}.get(self.shape)
        if chunks is not None and self.chunks != chunks:
            raise ValueError(f"{self.shape} placement has {chunks} chunk(s) a rank, got {self.chunks}")
        if self.ends_on_last and not self.folds:
            raise ValueError(
                f"{self.shape} placement with {self.chunks} chunk(s) a rank has embedding and head on two "
                "ranks: only a V, or a wave of an even number of chunks, can have both on the last one"
            )

    @property
    def turns_round(self) -> bool:
        """Whether the pipeline turns round at its ends, as a V and a wave do."""
        return self.shape in (Shape.V, Shape.WAVE)

    @property
    def folds(self) -> bool:
        """Whether one rank holds the first and the last stage by the shape, whichever rank that is."""
        return self.turns_round and self.chunks % 2 == 0

    @property
    def turned_over(self) -> "Placement":
        """The placement in which the ranks count from the other end; ValueError unless it ``folds``."""
        return replace(self, ends_on_last=not self.ends_on_last)

    def with_loss_on(self, rank: str) -> "Placement":
        """Return the placement with embedding and head on the ``FIRST`` or ``LAST`` rank, where it ``folds``.

        Any other one has the loss on the rank on which it always is.
        """
        return replace(self, ends_on_last=rank == LAST) if self.folds else self

    @property
    def has_mirrored(self) -> bool:
        """Whether any chunk runs from the last rank to the first."""
        return any(map(self.is_mirrored, range(self.chunks)))

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def is_mirrored(self, chunk: int) -> bool:
        """Whether this chunk runs from the last rank to the first."""
        return chunk % 2 != self.ends_on_last and self.turns_round

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds ``stage``."""
        self._require_stage(stage)
        chunk, offset = divmod(stage, self.ranks)
        return self.ranks - 1 - offset if self.is_mirrored(chunk) else offset

    def chunk_of(self, stage: int) -> int:
        """Return the number of ``stage`` among its rank's chunks."""
        self._require_stage(stage)
        return stage // self.ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that ``rank`` holds as its chunk number ``chunk``."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk must be in 0..{self.chunks - 1}, got {chunk}")
        offset = self.ranks - 1 - rank if self.is_mirrored(chunk) else rank
        return chunk * self.ranks + offset

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of ``rank``, in model order."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.chunks))

    def is_local(self, stage: int) -> bool:
        """Whether ``stage`` gives its output to a stage on its own rank, where a V turns round."""
        return stage + 1 < self.stages and self.rank_of(stage) == self.rank_of(stage + 1)

    def _require_stage(self, stage: int) -> None:
        if not 0 <= stage < self.stages:
            raise ValueError(f"stage must be in 0..{self.stages - 1}, got {stage}")


def linear(ranks: int) -> Placement:
    """Return the placement of one stage on each rank, in order."""
    return Placement(Shape.LINEAR, ranks)


def loop(ranks: int, chunks: int) -> Placement:
    """Return the placement of stage s on rank s mod ``ranks``."""
    return Placement(Shape.LOOP, ranks, chunks)


def v(ranks: int) -> Placement:
    """Return the placement that goes down the ranks and back up again."""
    return Placement(Shape.V, ranks, 2)


def wave(ranks: int, chunks: int) -> Placement:
    """Return the placement that goes down the ranks and up again in turns, for ``chunks`` legs."""
    return Placement(Shape.WAVE, ranks, chunks)
