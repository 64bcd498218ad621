"""The pipeline that this process was asked to run, if any.

Set once, while Megatron's arguments are validated; every seam asks here, and does what stock
does when nothing was asked for.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext.schedule.placement import Placement, Shape


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the flags said: the schedule's name in the catalogue, where stages live, what to record."""

    schedule: str | None
    placement: Placement
    trace: Path | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the placement."""
        return self.placement.shape

    def is_mirrored(self, chunk: int) -> bool:
        """Whether this chunk of every rank is placed from the other end."""
        return self.placement.is_mirrored(chunk)


_pipeline: Pipeline | None = None


def pipeline() -> Pipeline | None:
    """The pipeline asked for, or None: then everything stays stock."""
    return _pipeline


def require() -> Pipeline:
    """The pipeline asked for; only for code that runs when there is one."""
    if _pipeline is None:
        raise RuntimeError("no --pipeline-schedule is active")
    return _pipeline


def activate(pipeline: Pipeline | None) -> None:
    """Make ``pipeline`` the one that the seams serve; None returns to stock."""
    global _pipeline
    _pipeline = pipeline
