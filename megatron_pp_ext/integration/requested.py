"""The pipeline that this process was asked to run, if any.

Set once, while Megatron's arguments are validated; every seam asks here, and does what stock
does when nothing was asked for.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext.integration.request.profile_steps import ProfileSteps
from megatron_pp_ext.integration.request.sources import Source
from megatron_pp_ext.integration.request.updates import Updates
from megatron_pp_ext.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the flags said: where schedules come from, where stages live, what to record, when to update.

    Without a ``source`` stock's own schedules run, with stock's own ``placement``.
    """

    source: Source | None
    placement: Placement
    trace: Path | None = None
    updates: Updates | None = None
    """Of a pipeline that never flushes; None where every step ends with all its microbatches done."""
    profile_steps: ProfileSteps | None = None
    """The training steps to measure and to compile a better schedule from."""
    profile: Path | None = None
    """Where to write the costs of every layer, under stock's schedules."""
    rehearsal: Path | None = None
    """Where to write what this rank, alone in its pipeline, measured."""
    layers: tuple[int, ...] = ()
    """Of a rehearsed pipeline: how many layers each stage has."""

    @property
    def name(self) -> str:
        """The schedule's name, for people."""
        return self.source.name if self.source else f"stock {self.placement.shape}"

    @property
    def has_both_ends_on_first_rank(self) -> bool:
        """Whether the first rank holds the last stage too, as under a V; stock expects it on the last."""
        return self.source is not None and self.placement.rank_of(self.placement.stages - 1) == 0

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
