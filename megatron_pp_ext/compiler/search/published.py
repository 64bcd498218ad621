"""The published families as candidates: all that the catalogue can build with a placement."""

from collections.abc import Iterator

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement


def published(placement: Placement, microbatches: int) -> Iterator[Schedule]:
    """Every family with this very placement, in the catalogue's order."""
    for entry in catalog.ENTRIES.values():
        chunks = placement.chunks if entry.any_chunks else entry.chunks
        if entry.shape is not placement.shape or not entry.chunks <= placement.chunks == chunks:
            continue
        try:
            # Not catalog.build, which checks: on large pipelines that takes longer than all the rest,
            # and the compiler checks its winner.
            more = (chunks,) if entry.any_chunks else ()
            schedule = entry.builder(placement.ranks, microbatches, *more)
        except ValueError:  # a family that has no schedule for these sizes
            continue
        if schedule.placement == placement:
            yield schedule
