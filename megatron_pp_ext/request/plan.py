"""The numbers of ranks and microbatches that a description asks for, and whether they go together."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_pp_ext.planner.step.programs import FLUSH_FREE, NO_PIPELINE, PIPEDREAM, TWO_VERSIONS
from megatron_pp_ext.request.layers import spread
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement, linear


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule's name, its placement, and the data-parallel size and microbatches that are left over."""

    schedule: str
    placement: Placement
    data: int
    microbatches: int


def plan_of(args: Namespace, world_size: int, stages: int | None = None) -> Plan:
    """What ``args`` mean on ``world_size`` ranks.

    ``stages`` is how many a layout describes.  ValueError, with the nearest numbers that work, for sizes
    that do not divide.
    """
    ranks = args.pipeline_model_parallel_size
    model = args.tensor_model_parallel_size * ranks * args.context_parallel_size
    if world_size % model:
        below = world_size // model * model
        nearest = f"{below} or {below + model}" if below else f"{model}"
        raise ValueError(
            f"{world_size} GPUs cannot be shared by tensor x pipeline x context parallelism of "
            f"{args.tensor_model_parallel_size} x {ranks} x {args.context_parallel_size} = {model}: "
            f"nearest that work are {nearest}"
        )
    data = world_size // model
    require_divisible(args, world_size // ranks)
    if not args.micro_batch_size:
        raise ValueError("the model has no --micro-batch-size: give it")
    batch = args.global_batch_size or args.micro_batch_size * data
    each = args.micro_batch_size * data
    if batch % each:
        below = batch // each * each
        nearest = f"{below} or {below + each}" if below else f"{each}"
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{data} data-parallel ranks: nearest that work are {nearest}"
        )
    name = _schedule(args, ranks, stages)
    if name in FLUSH_FREE:
        update_interval(name, ranks, args.pipeline_update_interval, batch // each)
    return Plan(name, _placement(args, name, ranks, stages), data, batch // each)


def update_interval(name: str, ranks: int, asked: int | None, microbatches: int) -> int:
    """How many microbatches lie between two updates of a schedule that never flushes.

    ``asked`` is --pipeline-update-interval and ``microbatches`` those of a global batch, which is what
    Megatron takes for an update; ValueError unless they are the same, and enough for the schedule.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"--pipeline-update-interval is {asked}, but must be 1 or more")
    interval = asked or (microbatches if name == TWO_VERSIONS else 1)
    if interval != microbatches:
        raise ValueError(
            f"--pipeline-schedule {name} updates every {interval} microbatch(es), but --global-batch-size "
            f"makes {microbatches} a step; set it to {interval} x micro-batch size x data-parallel size, or "
            f"--pipeline-update-interval to {microbatches}"
        )
    if name == TWO_VERSIONS and interval < ranks:
        raise ValueError(
            f"--pipeline-schedule {name} needs as many microbatches an update as it has pipeline ranks, "
            f"{ranks}, but got {interval}; raise --global-batch-size, or choose {PIPEDREAM}"
        )
    return interval


def require_divisible(args: Namespace, stage_ranks: int) -> None:
    """ValueError unless tensor, context and expert parallelism cut the model into equal parts.

    ``stage_ranks`` hold a pipeline stage, its replicas included.
    """
    tensor, context, expert = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    heads, groups = args.num_attention_heads, args.num_query_groups if args.group_query_attention else tensor
    shares = args.seq_length // context % tensor if args.sequence_parallel else 0
    length = args.seq_length
    for flag, value, is_cut, what in (
        ("tensor-model-parallel-size", tensor, heads % tensor == 0, f"--num-attention-heads {heads}"),
        (
            "tensor-model-parallel-size",
            tensor,
            groups % tensor == 0 or tensor % groups == 0,
            f"--num-query-groups {groups}",
        ),
        (
            "context-parallel-size",
            context,
            context == 1 or length % (2 * context) == 0,
            f"half of --seq-length {length}",
        ),
        ("tensor-model-parallel-size", tensor, not shares, f"a rank's part of --seq-length {length}"),
        (
            "expert-model-parallel-size",
            expert,
            expert == 1 or (args.num_experts or 1) % expert == 0,
            f"--num-experts {args.num_experts}",
        ),
    ):
        if not is_cut:
            raise ValueError(f"--{flag} {value} does not divide {what}: change one of them")
    experts = expert * (args.expert_tensor_parallel_size or tensor)
    if stage_ranks % experts:
        raise ValueError(
            f"expert parallelism of {experts} (with its tensor parallelism) does not divide the "
            f"{stage_ranks} ranks of a pipeline stage: lower --expert-model-parallel-size"
        )


def _schedule(args: Namespace, ranks: int, stages: int | None) -> str:
    """The plugin's schedule, or the one of Megatron's own that the flags make it run."""
    if ranks == 1:
        if args.pipeline_schedule:
            raise ValueError(
                f"--pipeline-schedule {args.pipeline_schedule} needs a pipeline of 2 ranks or more: raise "
                "--pipeline-model-parallel-size"
            )
        return NO_PIPELINE
    if args.pipeline_schedule:
        name: str = args.pipeline_schedule
        if name in ("flex", *FLUSH_FREE):
            return name
        if name == "auto" or name.startswith("csv:"):
            raise ValueError(
                f"--pipeline-schedule {name} cannot be estimated before a run: use flex with "
                "--pipeline-memory-limit, or a schedule of mpp list"
            )
        return catalog.entry(name).name
    return "interleaved" if _chunks(args, ranks, stages) > 1 else "1f1b"


def _placement(args: Namespace, name: str, ranks: int, stages: int | None) -> Placement:
    if ranks == 1 or name in FLUSH_FREE:
        return linear(ranks)
    asked = _chunks(args, ranks, stages)
    if name == "flex":
        chunks = asked if asked > 1 or spread(args) % (2 * ranks) else 2
        return linear(ranks) if chunks == 1 else Placement(catalog.entry("v-half").shape, ranks, 2)
    entry = catalog.entry(name)
    fits = asked == 1 or asked == entry.chunks or (entry.any_chunks and asked >= entry.chunks)
    if not fits:
        raise ValueError(
            f"--pipeline-schedule {name} has {entry.chunks} chunk(s) a rank, but other flags ask for "
            f"{asked}: leave one out"
        )
    return Placement(entry.shape, ranks, max(asked, entry.chunks))


def _chunks(args: Namespace, ranks: int, stages: int | None) -> int:
    """Chunks a rank that Megatron's own flags ask for, 1 where they ask for none."""
    if stages is not None:
        return max(1, stages // ranks)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if layers:
        return max(1, spread(args) // (ranks * layers))
    return int(args.num_virtual_stages_per_pipeline_rank or 1)
