"""--pipeline-replicas: stages with different numbers of replicas."""

from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.families.round_robin import Replicas

if TYPE_CHECKING:
    from megatron_pp_ext.job.requested_job import RequestedJob

_FLAG = "--pipeline-replicas"


def requested(job: Job) -> Replicas | None:
    """The replicas of each stage of ``job``, None without the flag; ValueError if it cannot be."""
    given = job.pipeline.pipeline_replicas
    return None if given is None else _read(given, job.parallel.pipeline_model_parallel_size)


@lru_cache(maxsize=64)
def _read(given: str, stages: int) -> Replicas:
    counts = given.split("-")
    if len(counts) < 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"{_FLAG} is {given!r}, but must have a number above 0 for each stage, as in 3-1")
    if len(counts) != stages:
        raise ValueError(
            f"{_FLAG} {given} is for {len(counts)} stages, but --pipeline-model-parallel-size is {stages}; "
            f"set that to {len(counts)}, or give {stages} numbers"
        )
    return Replicas(tuple(map(int, counts)))


def of_stages(job: Job) -> Replicas:
    """The replicas of each stage, one each where ``job`` requests none; ValueError as for ``requested``."""
    return requested(job) or Replicas.straight(job.parallel.pipeline_model_parallel_size)


def require_world(job: Job, replicas: Replicas, world_size: int) -> None:
    """Raise ValueError unless ``world_size`` ranks are what ``replicas`` take, with tensor parallelism."""
    width = job.parallel.tensor_model_parallel_size
    if world_size != replicas.ranks * width:
        raise ValueError(
            f"{_FLAG} {replicas} takes {replicas.ranks} x --tensor-model-parallel-size {width} = "
            f"{replicas.ranks * width} ranks, but there are {world_size}; start as many"
        )


def require_turns(asked: "RequestedJob", replicas: Replicas, microbatches: int) -> None:
    """Raise ValueError unless the replicas of every stage have equal shares of a step and of an evaluation.

    ``microbatches`` are those of a global batch.
    """
    batch, evaluated = asked.batch, asked.flags.eval_global_batch_size
    each = asked.flags.eval_micro_batch_size or batch.micro_batch_size
    for flag, count in (
        ("--global-batch-size", microbatches),
        ("--eval-global-batch-size", (evaluated or batch.global_batch_size or each) // each),
    ):
        try:
            replicas.require_turns(count)
        except ValueError as error:
            raise ValueError(f"{flag}: {error} x micro-batch size") from error
