"""The registry of who finds layouts for a model, which is the planner: training does not import it."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp_ext.integration.registry import not_loaded
from megatron_pp_ext.integration.settings import Saving
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

type ResolveLayout = Callable[[RequestedJob, int, int], tuple[RequestedJob, str]]
"""(what is asked, data-parallel size, rows of the embedding) -> the same with a layout for ``auto``, and
words about it.

ValueError where there is no layout to choose.
"""

type Advise = Callable[[Job, int, Costs, Schedule, str, float], tuple[str, Saving] | None]
"""(job, data-parallel size, costs of its stages, schedule, its name, bytes that the fullest device leaves) ->
a layout and what it saves, None where none saves enough.

ValueError for a model that cannot be estimated.
"""


@dataclass(frozen=True, slots=True)
class _Finder:
    resolve: ResolveLayout
    advise: Advise


_finder: _Finder | None = None


def register(resolve: ResolveLayout, advise: Advise) -> None:
    """Let ``resolve`` find the layouts of ``auto``, and ``advise`` better ones for the next start."""
    global _finder
    _finder = _Finder(resolve, advise)


def resolve(asked: RequestedJob, data: int, vocabulary: int) -> tuple[RequestedJob, str]:
    """Return ``asked`` with a layout for ``auto``, as ``ResolveLayout`` does.

    ValueError, too, where nobody finds layouts.
    """
    if _finder is None:
        raise not_loaded("--pipeline-model-parallel-layout auto")
    return _finder.resolve(asked, data, vocabulary)


def advised(
    job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float
) -> tuple[str, Saving] | None:
    """Return a better layout for the next start, as ``Advise`` does; None where nobody looks for one."""
    return None if _finder is None else _finder.advise(job, data, costs, schedule, name, free)
