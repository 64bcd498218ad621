"""What the other products, the planner and PipeDream, add to training, which imports neither.

``launch.AllProducts`` has all of it.  Without ``use`` there is none, and flags that need it are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron_pp_ext.integration.requested import Pipeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_pp_ext.integration.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.integration.runners.transport import ProcessGroups
    from megatron_pp_ext.integration.settings import Saving
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.typed_job import Job
    from megatron_pp_ext.schedule.actions import Schedule
    from megatron_pp_ext.schedule.costs import Costs


class Products:
    """The other products where none is loaded: what needs one raises ValueError."""

    def require(self, pipeline: Pipeline) -> None:
        """Raise ValueError unless all is loaded that the steps of ``pipeline`` need."""
        if pipeline.updates is not None:
            raise _not_loaded(f"--pipeline-schedule {pipeline.request.schedule}")
        if pipeline.profile is not None:
            raise _not_loaded("--profile-pipeline")

    def flush_free(self, pipeline: Pipeline, transport: ProcessGroups) -> PipelineRunner:
        """Return the runner of steps that never flush, whose messages go over the groups of ``transport``."""
        raise _not_loaded(f"--pipeline-schedule {pipeline.request.schedule}")

    def profiling(
        self, group: dist.ProcessGroup, chunks: list[torch.nn.Module], forward_only: bool
    ) -> AbstractContextManager[None]:
        """Return a context around a step of Megatron's own schedule that measures every layer.

        ``group`` is the pipeline's, and ``forward_only`` says whether the step is an evaluation.
        """
        raise _not_loaded("--profile-pipeline")

    def layout(self, asked: RequestedJob, data: int, rows: int) -> tuple[RequestedJob, str]:
        """Return what is ``asked`` with a layout for ``auto``, and words about it.

        The job has ``data`` data-parallel ranks and an embedding of so many ``rows``.  ValueError where there
        is no layout to choose.
        """
        raise _not_loaded("--pipeline-model-parallel-layout auto")

    def better_layout(
        self, job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float
    ) -> tuple[str, Saving] | None:
        """Return a layout for the next start and what it saves; None where none saves enough.

        ``costs`` are those of the stages, ``name`` is the schedule's, and the fullest device has ``free``
        bytes left.  ValueError for a model that cannot be estimated.
        """
        return None

    def comparison(self, asked: RequestedJob, data: int) -> Sequence[str]:
        """Return lines about the step of what is ``asked`` with that of Megatron's own schedules."""
        return ()


def _not_loaded(flag: str) -> ValueError:
    return ValueError(
        f"{flag} needs a part of megatron_pp_ext that is not loaded; start the script with "
        "python -m megatron_pp_ext, or let it call install of megatron_pp_ext.launch"
    )


_loaded = Products()


def use(products: Products) -> None:
    """Let training ask ``products`` from now on."""
    global _loaded
    _loaded = products


def loaded() -> Products:
    """Return the products that training asks."""
    return _loaded
