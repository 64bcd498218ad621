"""The numbers of data-parallel ranks and of microbatches that Megatron's flags imply."""

from math import gcd

from megatron_pp_ext.job import replicas
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job


def fewest_ranks(job: Job) -> int:
    """The ranks of one copy of the model; with --pipeline-replicas, of all replicas of its stages."""
    replicated, parallel = replicas.requested_replicas(job), job.parallel
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
    replicated, parallel = replicas.requested_replicas(job), job.parallel
    if replicated:
        replicas.require_world(job, replicated, world_size)
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


def require_vocabulary(asked: RequestedJob) -> None:
    """Raise ValueError where neither a flag nor a tokenizer gives the size of the vocabulary."""
    if not (asked.model.padded_vocab_size or asked.model.vocab_size or asked.flags.tokenizer_type):
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

    ``stage_ranks`` hold a pipeline stage, its replicas included.
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
