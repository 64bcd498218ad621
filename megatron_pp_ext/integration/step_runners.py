"""The registries of step runners, and of what measures steps under Megatron's own schedules."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron_pp_ext.integration.registry import Registry
from megatron_pp_ext.integration.requested import Pipeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_pp_ext.integration.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.integration.runners.transport import ProcessGroups

type Make = Callable[[Pipeline, ProcessGroups], PipelineRunner]
"""Returns the runner of a pipeline, whose messages go over these groups."""

type Measure = Callable[[dist.ProcessGroup, list[torch.nn.Module], bool], AbstractContextManager[None]]
"""(pipeline group, chunks, whether it is an evaluation) -> a context around a step that measures it."""


def _needing_runner(pipeline: Pipeline) -> str | None:
    return None if pipeline.updates is None else f"--pipeline-schedule {pipeline.request.schedule}"


RUNNERS = Registry[Make](_needing_runner)
"""The runners of steps; a pipeline for which there is none has flushed steps and the requested schedule."""

MEASURES = Registry[Measure](lambda pipeline: None if pipeline.profile is None else "--profile-pipeline")
"""What measures steps under Megatron's own schedules."""


def require_loaded(pipeline: Pipeline) -> None:
    """Raise ValueError unless all is registered that the steps of ``pipeline`` need."""
    RUNNERS.find(pipeline)
    MEASURES.find(pipeline)
