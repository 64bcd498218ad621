"""The number of chunks a rank that Megatron's own flags request, and whether a schedule has as many."""

from argparse import Namespace

from megatron_pp_ext.job import layers


def chunks_requested(args: Namespace) -> int | None:
    """The chunks a rank that Megatron's own flags request; None where they do not."""
    ranks = args.pipeline_model_parallel_size
    stages = layers.stages_described(args)
    if stages is not None:
        if stages % ranks:
            raise ValueError(
                f"{_stages_flag(args)} has {stages} stages, which {ranks} pipeline ranks cannot "
                f"share evenly; give it {ranks} or {2 * ranks} stages"
            )
        return stages // ranks
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    each = args.num_layers_per_virtual_pipeline_stage
    if each is not None:
        by_rank = layers.spread(args) // ranks
        if by_rank % each:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {by_rank} layers of a "
                "pipeline rank; set it to a number that does, or leave it out"
            )
        return max(1, by_rank // each)
    return None


def require_chunks(
    args: Namespace, name: str, requested: int | None, chunks: int, accepted: bool, more: str
) -> None:
    """ValueError where Megatron's own flags request chunks that the schedule does not have."""
    stages = chunks * args.pipeline_model_parallel_size
    letters = layers.pattern(args)
    if requested is None and letters and chunks > 1:
        raise ValueError(
            f"--pipeline-schedule {name} has {stages} stages, between which --hybrid-layer-pattern needs "
            f"a |; write it as {layers.cut_evenly(letters, stages)}, for example"
        )
    if accepted:
        return
    if layers.stages_described(args) is not None:
        flag, fix = _stages_flag(args), f"give it {stages} stages"
    elif args.num_virtual_stages_per_pipeline_rank is not None:
        flag, fix = "--num-virtual-stages-per-pipeline-rank", f"set it to {chunks}"
    else:
        flag, fix = "--num-layers-per-virtual-pipeline-stage", "leave it out"
    raise ValueError(
        f"--pipeline-schedule {name} has {chunks}{more} chunk(s) a rank, but {flag} requests "
        f"{requested}; {fix}, or choose another schedule"
    )


def _stages_flag(args: Namespace) -> str:
    return "--hybrid-layer-pattern" if layers.pattern(args) else "--pipeline-model-parallel-layout"
