"""The numbers of data-parallel ranks and of microbatches that Megatron's flags imply."""

from argparse import Namespace

from megatron_pp_ext.job import replicas


def fewest_ranks(args: Namespace) -> int:
    """The ranks of one copy of the model; with --pipeline-replicas those of all replicas of its stages."""
    replicated = replicas.requested(args)
    across = replicated.ranks if replicated else args.pipeline_model_parallel_size
    return int(args.tensor_model_parallel_size * across * args.context_parallel_size)


def data_parallel_size(args: Namespace, world_size: int) -> int:
    """The data-parallel size on ``world_size`` ranks; 1 where stages have numbers of replicas of their own.

    ValueError, with the nearest numbers that work, where the parallel sizes do not divide ranks or model.
    """
    replicated = replicas.requested(args)
    if replicated:
        replicas.require_world(args, replicated, world_size)
        require_divisible(args, args.tensor_model_parallel_size)
        return 1
    ranks, model = args.pipeline_model_parallel_size, fewest_ranks(args)
    if world_size % model:
        below = world_size // model * model
        nearest = f"{below} or {below + model}" if below else f"{model}"
        raise ValueError(
            f"{world_size} GPUs cannot be shared by tensor x pipeline x context parallelism of "
            f"{args.tensor_model_parallel_size} x {ranks} x {args.context_parallel_size} = {model}: "
            f"nearest that work are {nearest}"
        )
    require_divisible(args, world_size // ranks)
    return world_size // model


def require_vocabulary(args: Namespace) -> None:
    """Raise ValueError where neither a flag nor a tokenizer tells the size of the vocabulary."""
    if not (args.padded_vocab_size or args.vocab_size or args.tokenizer_type):
        raise ValueError(
            "cannot estimate the output layer without the size of the vocabulary; give --tokenizer-type and "
            "what goes with it, or --padded-vocab-size"
        )


def batches(args: Namespace) -> list[int]:
    """The sizes of a batch in samples, in the order of training: several where the batch grows.

    Empty where no flag gives any: Megatron then takes one microbatch a rank.
    """
    growing = getattr(args, "step_batch_size_schedule", None)
    if args.global_batch_size is None and growing:
        return [int(step.rpartition(":")[2]) for step in growing.replace(",", " ").split()]
    return [] if args.global_batch_size is None else [args.global_batch_size]


def microbatches(args: Namespace, data: int) -> int:
    """The microbatches of an ordinary step on ``data`` data-parallel ranks.

    Where the batch grows, they are those of its last size, which most steps have.  ValueError for a batch
    that is not a multiple of the samples in one microbatch of all ranks.
    """
    if not args.micro_batch_size:
        raise ValueError("the model has no --micro-batch-size: give it")
    each, found = args.micro_batch_size * data, 1
    flag = "--global-batch-size" if args.global_batch_size is not None else "--step-batch-size-schedule"
    for batch in batches(args):
        if batch < each:
            raise ValueError(
                f"{flag} {batch} makes 0 microbatches of --micro-batch-size "
                f"{args.micro_batch_size} on {data} data-parallel rank(s); set it to {each} or more"
            )
        if batch % each and not args.decrease_batch_size_if_needed:
            below = batch // each * each
            raise ValueError(
                f"{flag} {batch} is no multiple of --micro-batch-size {args.micro_batch_size} x "
                f"{data} data-parallel ranks: nearest that work are {below} or {below + each}"
            )
        found = batch // each
    return int(found)


def require_divisible(args: Namespace, stage_ranks: int) -> None:
    """ValueError unless tensor, context and expert parallelism cut the model into equal parts.

    ``stage_ranks`` hold a pipeline stage, its replicas included.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    expert, experts = args.expert_model_parallel_size, args.num_experts or 1
    heads, groups = args.num_attention_heads, args.num_query_groups if args.group_query_attention else tensor
    length = args.seq_length
    shares = length // context % tensor if args.sequence_parallel else 0
    for flag, value, is_cut, what in (
        ("tensor-model", tensor, heads % tensor == 0, f"--num-attention-heads {heads}"),
        ("tensor-model", tensor, not (groups % tensor and tensor % groups), f"--num-query-groups {groups}"),
        ("context", context, context == 1 or length % (2 * context) == 0, f"half of --seq-length {length}"),
        ("tensor-model", tensor, not shares, f"a rank's part of --seq-length {length}"),
        ("expert-model", expert, experts % expert == 0, f"--num-experts {args.num_experts}"),
    ):
        if not is_cut:
            raise ValueError(f"--{flag}-parallel-size {value} does not divide {what}: change one of them")
    expert_ranks = expert * (args.expert_tensor_parallel_size or tensor)
    if stage_ranks % expert_ranks:
        raise ValueError(
            f"expert parallelism of {expert_ranks} (with its tensor parallelism) does not divide the "
            f"{stage_ranks} ranks of a pipeline stage: lower --expert-model-parallel-size"
        )
