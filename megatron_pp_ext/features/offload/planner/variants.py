"""A search's second try for candidates that do not fit: a share of their activations waits on the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.variants import Variants
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO

if TYPE_CHECKING:
    from megatron_pp_ext.planner.search.candidate import Candidate
    from megatron_pp_ext.planner.search.replays import Evaluated, Replays


class OnHost(Variants):
    """Candidates with a share of their activations on the host."""

    arguments = ("pipeline_offload",)
    entries = ("offload",)
    label = ("host...", "the percentage of activations that wait on the host")

    def refuse(self, asked: RequestedJob) -> None:
        if asked.pipeline.pipeline_offload not in (None, AUTO):
            raise ValueError(
                f"--pipeline-offload is {asked.pipeline.pipeline_offload}, but a search chooses a share "
                f"itself where memory asks for it: give {AUTO}, or ask mpp estimate"
            )

    def are_tried(self, job: Job) -> bool:
        return job.pipeline.pipeline_offload is not None

    def replayed(
        self, replays: "Replays", candidate: "Candidate", limit: float, headroom: Callable[[float], float]
    ) -> "Evaluated | None":
        # Most commands never come here.
        from megatron_pp_ext.features.offload.planner.host_replays import HostReplays

        if candidate.pipeline == 1 or not catalog.abilities(candidate.schedule).flushes:
            return None
        return HostReplays(replays).replayed(candidate, limit, headroom)
