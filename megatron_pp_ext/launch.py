"""All of this package in one training script that reads flags: training, the planner and PipeDream.

Training imports neither of the other two.  What they add is imported in the first step or flag that needs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron_pp_ext import megatron
from megatron_pp_ext.megatron.requested import Products, use

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.typed_job import Job
    from megatron_pp_ext.megatron.requested import Pipeline, Saving
    from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.megatron.runners.transport import ProcessGroups
    from megatron_pp_ext.schedule.actions import Schedule
    from megatron_pp_ext.schedule.costs import Costs


def install(cpu: bool = False) -> None:
    """Put the schedules into Megatron, and with ``cpu`` what it needs to run without a GPU.

    End the process with a one-line message, and Megatron untouched, if a hook does not fit or the release is
    unknown.
    """
    megatron.install(cpu)
    use(AllProducts())


class AllProducts(Products):
    """The planner and PipeDream."""

    def require(self, pipeline: Pipeline) -> None:
        """See ``Products``: all is there."""

    def flush_free(self, pipeline: Pipeline, transport: ProcessGroups) -> PipelineRunner:
        from megatron_pp_ext.pipedream import flush_free

        return flush_free.runner(pipeline, transport)

    def profiling(
        self, group: dist.ProcessGroup, chunks: list[torch.nn.Module], forward_only: bool
    ) -> AbstractContextManager[None]:
        from megatron_pp_ext.pipedream.layer_profiler import profiling

        return profiling(group, chunks, forward_only)

    def layout(self, job: RequestedJob, data: int, rows: int) -> tuple[RequestedJob, str]:
        from megatron_pp_ext.planner.layout import requested_layout

        return requested_layout.resolve(job, data, rows)

    def better_layout(
        self, job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float
    ) -> tuple[str, Saving] | None:
        from megatron_pp_ext.planner.layout.requested_layout import advised

        return advised(job, data, costs, schedule, name, free)

    def pipeline_seconds(self, job: RequestedJob, data: int, schedule: Schedule, device: str) -> float | None:
        from megatron_pp_ext.planner.step.estimate import pipeline_seconds

        return pipeline_seconds(job, data, schedule, device)

    def comparison(self, job: RequestedJob, data: int) -> list[str]:
        from megatron_pp_ext.megatron import start_up
        from megatron_pp_ext.planner.step import comparison

        return comparison.at_start(job, data, lambda: start_up.vocabulary(job))
