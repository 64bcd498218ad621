"""The pipeline that is in force in this process, if one is.

Flags set it once, while Megatron validates its arguments; a call of ``install`` sets it for the models that
are built from then on.  Where there is none, every hook does what stock does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.integration.settings import Settings
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.updates import Updates


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The requested pipeline: its request, its source of schedules, and its measurements.

    Without a ``source`` stock's own schedules run, with stock's own placement.
    """

    request: Request
    source: Source | None = None
    settings: Settings = field(default_factory=Settings)
    """The training run that the pipeline is part of."""
    trace: Path | None = None
    predicting: int | None = None
    """The stage that has multi-token prediction (MTP), with a copy of the embedding."""
    profile: Path | None = None
    """The file for the costs of every layer, measured under stock's schedules."""
    rehearsal: Path | None = None
    """The file for this rank's measurements while it runs without the others."""
    layers: tuple[int, ...] = ()
    """The number of layers of each stage; only a rehearsal sets it."""
    is_per_model: bool = False
    """Whether it is for the models that are built under it, while others may run stock's schedule;
    else it is for the one model of the process."""
    costs: Costs | None = None
    """The costs of the call; None where they follow from a model or from flags."""
    is_unproved: bool = False
    """Whether a call permits operation that was never tried on a GPU."""
    layout: str = ""
    """Words about a layout that this package chose; empty where the user gave it, or none."""
    summary: str = ""
    """The lines about the schedule that the first rank prints; other ranks need not have them."""

    @property
    def placement(self) -> Placement:
        """The placement of the stages, from the source, since a compiler may choose among several."""
        return self.source.placement if self.source else self.request.placement

    @property
    def updates(self) -> Updates | None:
        """The updates of a pipeline that never flushes; None where every step flushes."""
        return self.request.updates

    @property
    def name(self) -> str:
        return self.source.name if self.source else f"stock {self.placement.shape}"

    @property
    def has_embedding_with_head(self) -> bool:
        """Whether one rank holds the first and the last stage, as under a V; stock has them on two."""
        return self.source is not None and self.embedding_rank == self.placement.rank_of(
            self.placement.stages - 1
        )

    @property
    def embedding_rank(self) -> int:
        """The rank with the first stage, and, under a V, with the last stage too."""
        return self.placement.rank_of(0)

    @property
    def moves_stages(self) -> bool:
        """Whether a rank holds other parts of the model than under Megatron's own schedules."""
        return self.placement.has_mirrored or self.placement.splits_head

    def is_mirrored(self, chunk: int) -> bool:
        """Whether this chunk of every rank is placed from the other end."""
        return self.placement.is_mirrored(chunk)


_pipeline: Pipeline | None = None


def pipeline() -> Pipeline | None:
    """The requested pipeline; None where everything stays stock."""
    return _pipeline


def require() -> Pipeline:
    """The requested pipeline, for code that runs only when there is one."""
    if _pipeline is None:
        raise RuntimeError("no --pipeline-schedule is active")
    return _pipeline


def activate(pipeline: Pipeline | None) -> None:
    """Make ``pipeline`` the one that the hooks serve; None returns to stock."""
    global _pipeline
    _pipeline = pipeline


@contextmanager
def using(pipeline: Pipeline | None) -> Iterator[None]:
    """Make ``pipeline`` the one that the hooks serve within the context."""
    before = _pipeline
    activate(pipeline)
    try:
        yield
    finally:
        activate(before)
