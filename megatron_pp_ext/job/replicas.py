"""--pipeline-replicas: stages with different numbers of replicas, and the flags that cannot be had with them.

Megatron's groups are rectangular: every stage has as many data-parallel ranks as every other.  Replicated
stages have groups of their own (``integration.core.replicated_ranks``), and what needs the rectangle is
refused.
"""

from argparse import Namespace

from megatron_pp_ext.job.refusals import Refusal, refuse_first
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.names import PIPEDREAM

_FLAG = "--pipeline-replicas"
_SUMS = "it sums over a pipeline, and the ranks of a stage are in several of them"
_OF_REPLICAS = "the replicas of a stage would start a reduction at different places of the schedule"
_READS = "it shares out samples as if all stages had as many replicas"

_REFUSED = (
    Refusal("--pipeline-allow-waits", _SUMS, "leave it out"),
    Refusal("--log-params-norm", _SUMS, "leave it out"),
    Refusal("--num-experts", "the losses of routers are summed over a pipeline", "take a model without"),
    Refusal(
        "--context-parallel-size",
        "a replica has tensor-parallel ranks alone",
        "set it to 1",
        lambda args: args.context_parallel_size > 1,
    ),
    Refusal("--overlap-grad-reduce", _OF_REPLICAS, "leave it out"),
    Refusal(
        "--use-distributed-optimizer",
        "its checkpoints, and the norm of its gradients, count as many replicas in all stages",
        "leave it out",
    ),
    Refusal(
        "--optimizer dist_...",
        "it shares out layers as if all stages had as many replicas",
        "choose another one",
        lambda args: str(args.optimizer).startswith("dist_"),
    ),
    Refusal(
        "--ddp-average-in-collective", "gradients are summed over the replicas of a stage", "leave it out"
    ),
    Refusal("--data-parallel-random-init", "it counts as many replicas in all stages", "leave it out"),
    Refusal("--create-all-gather-group", "its groups have as many replicas in all stages", "leave it out"),
    Refusal("--use-tp-pp-dp-mapping", "ranks go by stage, then by replica", "leave it out"),
    Refusal(
        "--dataloader-type cyclic",
        _READS,
        "choose single",
        lambda args: getattr(args, "dataloader_type", None) not in (None, "single"),
    ),
    Refusal("--full-validation", _READS, "set --eval-iters"),
    Refusal("--pipeline-trace", "a trace has one rank for each stage", "leave one of the two out"),
)


def requested(args: Namespace) -> Replicas | None:
    """The replicas of each stage that ``args`` request, None without the flag; ValueError if it cannot be."""
    given, schedule = args.pipeline_replicas, args.pipeline_schedule
    if given is None:
        return None
    if catalog.abilities(schedule).flushes:
        beside = "Megatron's own schedules" if schedule is None else f"--pipeline-schedule {schedule}"
        raise ValueError(f"{_FLAG} {given} has no meaning for {beside}; leave it out, or choose {PIPEDREAM}")
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


def refuse(args: Namespace, replicas: Replicas, microbatches: int) -> None:
    """Raise ValueError for the first flag that cannot be had with ``replicas``, and for unequal shares.

    ``microbatches`` are those of a global batch.
    """
    refuse_first(args, _REFUSED, by=_FLAG)
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
