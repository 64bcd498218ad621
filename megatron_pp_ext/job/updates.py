"""The updates of schedules that never flush, as their flags request them.

A training step of Megatron is one update.  Under ``pipedream`` and ``pipedream-2bw`` each stage updates
its weights as soon as its own backwards are done.
"""

from megatron_pp_ext.job import replicas
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.families.pipedream import WeightVersion
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.names import PIPEDREAM
from megatron_pp_ext.schedule.updates import Updates


def read(job: Job, microbatches: int) -> Updates:
    """The updates of ``job``; ValueError where the schedule cannot have them.

    ``microbatches`` are those of a global batch, on which Megatron's optimizer, learning rate and logs base
    an update.
    """
    name, stages = job.pipeline.pipeline_schedule, replicas.of_stages(job)
    assert name is not None
    return described(job, name, _interval(name, stages, job.pipeline.pipeline_update_interval, microbatches))


def described(job: Job, name: str, interval: int) -> Updates:
    """Return the updates of the schedule ``name`` as ``job`` has them otherwise, unchecked."""
    options = job.pipeline
    if catalog.abilities(name).has_two_versions:
        weights = WeightVersion.PREVIOUS
    else:
        weights = WeightVersion.SAME if options.pipeline_vertical_sync else WeightVersion.LATEST
    return Updates(interval, weights, options.pipeline_allow_waits, replicas.of_stages(job))


def _interval(name: str, stages: Replicas, requested: int | None, microbatches: int) -> int:
    """The microbatches between two updates; ``requested`` is --pipeline-update-interval.

    ValueError unless they are the ``microbatches`` of a global batch, and enough for the schedule.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"--pipeline-update-interval is {requested}, but must be 1 or more")
    has_two_versions = catalog.abilities(name).has_two_versions
    interval = requested or (microbatches if has_two_versions else stages.full_round)
    if interval != microbatches:
        raise ValueError(
            f"--pipeline-schedule {name} updates every {interval} microbatch(es), but --global-batch-size "
            f"makes {microbatches} a step; set it to {interval} x micro-batch size x data-parallel size, or "
            f"--pipeline-update-interval to {microbatches}"
        )
    if has_two_versions and interval < stages.ranks:
        raise ValueError(
            f"--pipeline-schedule {name} needs as many microbatches an update as it has pipeline ranks, "
            f"{stages.ranks}, but got {interval}; raise --global-batch-size, or choose {PIPEDREAM}"
        )
    return interval
