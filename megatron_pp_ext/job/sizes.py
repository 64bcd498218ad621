"""The numbers that flags imply: data-parallel ranks, replicas of stages, microbatches, updates."""

from functools import lru_cache
from math import gcd

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import PIPEDREAM
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates, WeightVersion

_FLAG = "--pipeline-replicas"


def requested_replicas(job: Job) -> Replicas | None:
    """The replicas of each stage of ``job``, None without the flag; ValueError if it cannot be."""
    text = job.pipeline.pipeline_replicas
    return None if text is None else _read(text, job.parallel.pipeline_model_parallel_size)


@lru_cache(maxsize=64)
def _read(text: str, stages: int) -> Replicas:
    counts = text.split("-")
    if len(counts) < 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"{_FLAG} is {text!r}, but must have a number above 0 for each stage, as in 3-1")
    if len(counts) != stages:
        raise ValueError(
            f"{_FLAG} {text} is for {len(counts)} stages, but --pipeline-model-parallel-size is {stages}; "
            f"set that to {len(counts)}, or give {stages} numbers"
        )
    return Replicas(tuple(map(int, counts)))


def of_stages(job: Job) -> Replicas:
    """Return the replicas of each stage, one each where ``job`` requests none.

    Raises ValueError as ``requested_replicas`` does.
    """
    return requested_replicas(job) or Replicas.straight(job.parallel.pipeline_model_parallel_size)


def require_world(job: Job, replicas: Replicas, world_size: int) -> None:
    """Raise ValueError unless ``world_size`` ranks make up the ``replicas``, tensor ranks included."""
    width = job.parallel.tensor_model_parallel_size
    if world_size != replicas.ranks * width:
        raise ValueError(
            f"{_FLAG} {replicas} takes {replicas.ranks} x --tensor-model-parallel-size {width} = "
            f"{replicas.ranks * width} ranks, but there are {world_size}; start as many"
        )


def require_turns(job: "RequestedJob", replicas: Replicas, microbatches: int) -> None:
    """Raise ValueError unless the replicas of every stage have equal shares of a step and of an evaluation.

    ``microbatches`` are those of a global batch.
    """
    batch, evaluated = job.batch, job.flags.eval_global_batch_size
    samples = job.flags.eval_micro_batch_size or batch.micro_batch_size
    for flag, count in (
        ("--global-batch-size", microbatches),
        ("--eval-global-batch-size", (evaluated or batch.global_batch_size or samples) // samples),
    ):
        try:
            replicas.require_turns(count)
        except ValueError as error:
            raise ValueError(f"{flag}: {error} x micro-batch size") from error


def read(job: Job, microbatches: int) -> Updates:
    """The updates of ``job``; ValueError where the schedule cannot have them.

    ``microbatches`` are those of a global batch, on which Megatron's optimizer, learning rate and logs base
    an update.

    A training step of Megatron is one update.  Under ``pipedream`` and ``pipedream-2bw`` each stage updates
    its weights as soon as its own backwards are done.
    """
    name, stages = job.pipeline.pipeline_schedule, of_stages(job)
    assert name is not None
    return described(job, name, _interval(name, stages, job.pipeline.pipeline_update_interval, microbatches))


def described(job: Job, name: str, interval: int) -> Updates:
    """Return the updates of the schedule ``name`` as ``job`` has them otherwise, unchecked."""
    options = job.pipeline
    if catalog.abilities(name).has_two_versions:
        weights = WeightVersion.PREVIOUS
    else:
        weights = WeightVersion.SAME if options.pipeline_vertical_sync else WeightVersion.LATEST
    return Updates(interval, weights, options.pipeline_allow_waits, of_stages(job))


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


def fewest_ranks(job: Job) -> int:
    """The ranks of one copy of the model; with --pipeline-replicas, of all replicas of its stages."""
    replicated, parallel = requested_replicas(job), job.parallel
    across = replicated.ranks if replicated else parallel.pipeline_model_parallel_size
    return parallel.tensor_model_parallel_size * across * parallel.context_parallel_size


def smallest_world(job: Job) -> int:
    """The fewest ranks that hold whole copies of the model, and whole groups of experts in each stage."""
    copy, parallel = fewest_ranks(job), job.parallel
    experts, of_stage = parallel.expert_ranks, copy // parallel.pipeline_model_parallel_size
    return copy * (experts // gcd(experts, of_stage))


def data_parallel_size(job: Job, world_size: int) -> int:
    """The data-parallel size on ``world_size`` ranks; 1 where stages have numbers of replicas of their own.

    ValueError, with the nearest numbers that work, where the parallel sizes do not divide ranks or model.
    """
    replicated, parallel = requested_replicas(job), job.parallel
    if replicated:
        require_world(job, replicated, world_size)
        require_divisible(job, parallel.tensor_model_parallel_size)
        return 1
    ranks, model = parallel.pipeline_model_parallel_size, fewest_ranks(job)
    if world_size % model:
        below = world_size // model * model
        nearest = f"{below} or {below + model}" if below else f"{model}"
        raise ValueError(
            f"{world_size} GPUs cannot be shared by tensor x pipeline x context parallelism of "
            f"{parallel.tensor_model_parallel_size} x {ranks} x {parallel.context_parallel_size} = {model}: "
            f"nearest that work are {nearest}"
        )
    require_divisible(job, world_size // ranks)
    return world_size // model


def require_vocabulary(job: RequestedJob) -> None:
    """Raise ValueError where neither a flag nor a tokenizer gives the size of the vocabulary."""
    if not (job.model.padded_vocab_size or job.model.vocab_size or job.flags.tokenizer_type):
        raise ValueError(
            "cannot estimate the output layer without the size of the vocabulary; give --tokenizer-type and "
            "what goes with it, or --padded-vocab-size"
        )


def microbatches(job: Job, data: int) -> int:
    """The microbatches of an ordinary step on ``data`` data-parallel ranks.

    Where the batch grows, they are its last size's, which most steps have.  ValueError for a batch
    that is not a multiple of the samples in one microbatch of all ranks.
    """
    batch_part = job.batch
    if not batch_part.micro_batch_size:
        raise ValueError("the model has no --micro-batch-size: give it")
    samples, count = batch_part.micro_batch_size * data, 1
    flag = "--global-batch-size" if batch_part.global_batch_size is not None else "--step-batch-size-schedule"
    for batch in batch_part.sizes:
        if batch < samples:
            raise ValueError(
                f"{flag} {batch} makes 0 microbatches of --micro-batch-size "
                f"{batch_part.micro_batch_size} on {data} data-parallel rank(s); set it to {samples} or more"
            )
        if batch % samples and not batch_part.decrease_batch_size_if_needed:
            below = batch // samples * samples
            raise ValueError(
                f"{flag} {batch} is no multiple of --micro-batch-size {batch_part.micro_batch_size} x "
                f"{data} data-parallel ranks: nearest that work are {below} or {below + samples}"
            )
        count = batch // samples
    return count


def require_divisible(job: Job, stage_ranks: int) -> None:
    """ValueError unless tensor, context and expert parallelism cut the model into equal parts.

    ``stage_ranks`` hold a pipeline stage, its replicas included; they make up whole instances of the
    distributed optimizer, too.
    """
    model, parallel = job.model, job.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    expert, experts = parallel.expert_model_parallel_size, model.num_experts or None
    heads, length = model.num_attention_heads, model.seq_length
    groups = model.num_query_groups if model.group_query_attention else tensor
    shares = length // context % tensor if parallel.sequence_parallel else 0
    for flag, value, is_cut, size in (
        ("tensor-model", tensor, heads % tensor == 0, f"--num-attention-heads {heads}"),
        ("tensor-model", tensor, not (groups % tensor and tensor % groups), f"--num-query-groups {groups}"),
        ("context", context, context == 1 or length % (2 * context) == 0, f"half of --seq-length {length}"),
        ("tensor-model", tensor, not shares, f"a rank's part of --seq-length {length}"),
        ("expert-model", expert, (experts or 1) % expert == 0, f"--num-experts {experts}"),
    ):
        if not is_cut:
            raise ValueError(f"--{flag}-parallel-size {value} does not divide {size}: change one of them")
    if stage_ranks % parallel.expert_ranks:
        raise ValueError(
            f"expert parallelism of {parallel.expert_ranks} (with its tensor parallelism) does not divide "
            f"the {stage_ranks} ranks of a pipeline stage: lower --expert-model-parallel-size"
        )
    instances = job.memory.instances
    for what, copies in (
        ("model", stage_ranks // tensor),
        ("experts", stage_ranks // parallel.expert_ranks if experts else instances),
    ):
        if copies % instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances {instances} does not divide the {copies} ranks that "
                f"have the same part of the {what}: lower it"
            )
