"""--pipeline-replicas: stages with different numbers of replicas."""

from argparse import Namespace

from megatron_pp_ext.schedule.families.round_robin import Replicas

_FLAG = "--pipeline-replicas"


def requested(args: Namespace) -> Replicas | None:
    """The replicas of each stage that ``args`` request, None without the flag; ValueError if it cannot be."""
    given = args.pipeline_replicas
    if given is None:
        return None
    counts = given.split("-")
    stages = args.pipeline_model_parallel_size
    if len(counts) < 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"{_FLAG} is {given!r}, but must have a number above 0 for each stage, as in 3-1")
    if len(counts) != stages:
        raise ValueError(
            f"{_FLAG} {given} is for {len(counts)} stages, but --pipeline-model-parallel-size is {stages}; "
            f"set that to {len(counts)}, or give {stages} numbers"
        )
    return Replicas(tuple(map(int, counts)))


def of_stages(args: Namespace) -> Replicas:
    """The replicas of each stage, one each where ``args`` request none; ValueError as for ``requested``."""
    return requested(args) or Replicas.straight(args.pipeline_model_parallel_size)


def require_world(args: Namespace, replicas: Replicas, world_size: int) -> None:
    """Raise ValueError unless ``world_size`` ranks are what ``replicas`` take, with tensor parallelism."""
    width = args.tensor_model_parallel_size
    if world_size != replicas.ranks * width:
        raise ValueError(
            f"{_FLAG} {replicas} takes {replicas.ranks} x --tensor-model-parallel-size {width} = "
            f"{replicas.ranks * width} ranks, but there are {world_size}; start as many"
        )


def require_turns(args: Namespace, replicas: Replicas, microbatches: int) -> None:
    """Raise ValueError unless the replicas of every stage have equal shares of a step and of an evaluation.

    ``microbatches`` are those of a global batch.
    """
    evaluated = getattr(args, "eval_global_batch_size", None)
    each = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    for flag, count in (
        ("--global-batch-size", microbatches),
        ("--eval-global-batch-size", (evaluated or args.global_batch_size or each) // each),
    ):
        try:
            replicas.require_turns(count)
        except ValueError as error:
            raise ValueError(f"{flag}: {error} x micro-batch size") from error
