"""The registry of step runners, of which ``choose`` takes the one that is for its pipeline."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_pp_ext.integration.registry import Registry, not_loaded
from megatron_pp_ext.integration.requested import Pipeline

if TYPE_CHECKING:
    from megatron_pp_ext.integration.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.integration.runners.transport import ProcessGroups

type Make = Callable[[Pipeline, ProcessGroups], PipelineRunner]
"""Returns the runner of a pipeline, whose messages go over these groups."""

_registry = Registry[Make]()

register = _registry.register


def find(pipeline: Pipeline) -> Make | None:
    """Return what makes the runner of ``pipeline``; None for flushed steps under the requested schedule.

    ValueError for a pipeline that never flushes where no runner is registered for it.
    """
    make = _registry.find(pipeline)
    if make is None and pipeline.updates is not None:
        raise not_loaded(f"--pipeline-schedule {pipeline.request.schedule}")
    return make
