"""Megatron's process groups and sums for stages with different numbers of replicas.

Megatron's groups are the rows and columns of a box of ranks.  Here ranks go by stage, then by replica, then
by tensor parallelism, and the groups of a rank are those that it would have if all stages were like its own:

* its data-parallel group has the replicas of its stage, so that models, reductions, checkpoints and the mean
  of losses are stock's;
* its pipeline group has the rank itself for its stage, and the first replica of every other stage.  The
  group only states where the rank is.  Nothing is sent in it, since a first replica is in several
  pipelines but has the group of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.embedding_copies import embed_on_one_rank
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.schedule.families.pipedream import Replicas


def replicated() -> Replicas | None:
    """Return the replicas of the stages of this process's pipeline; None if all have one."""
    pipeline = requested.pipeline()
    return None if pipeline is None else pipeline.replicas


@hook(
    "megatron.core.parallel_state:RankGenerator.get_ranks",
    "self token",
    "process groups for stages with different numbers of replicas",
)
def list_groups(stock: Callable[..., list[list[int]]], generator: Any, token: str) -> list[list[int]]:
    """List the groups of replicated stages; Megatron makes all of its process groups from such lists."""
    replicas = replicated()
    if replicas is None:
        return stock(generator, token)
    axes = token.split("-")
    if "pp" in axes:
        together = _pipelines(replicas)
    elif "dp" in axes:
        together = [replicas.ranks_of(stage) for stage in range(replicas.stages)]
    else:
        together = [[rank] for rank in range(replicas.ranks)]
    width = generator.tp
    columns = [range(width)] if "tp" in axes else [[column] for column in range(width)]
    return [
        [rank * width + column for rank in ranks for column in of_group]
        for ranks in together
        for of_group in columns
    ]


def _pipelines(replicas: Replicas) -> list[Sequence[int]]:
    """Return the pipeline of every rank; last that of the first replicas, whose group they keep."""
    first = [replicas.first_rank(stage) for stage in range(replicas.stages)]
    pipelines = []
    for rank in range(replicas.ranks):
        if rank not in first:
            stage = replicas.stage_of(rank)
            pipelines.append([*first[:stage], rank, *first[stage + 1 :]])
    return [*pipelines, first]


_SIZES = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "pipeline_model_parallel_comm_backend use_sharp context_parallel_size "
    "hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size"
)
_GROUPS = (
    "num_distributed_optimizer_instances expert_tensor_parallel_size nccl_communicator_config_path "
    "distributed_timeout_minutes order get_embedding_ranks get_position_embedding_ranks "
    "create_gloo_process_groups high_priority_stream_groups sharp_enabled_group"
)
_RANKS = "rank_offset local_world_size"


@hook(
    "megatron.core.parallel_state:initialize_model_parallel",
    (
        f"{_SIZES} {_GROUPS}",
        f"{_SIZES} {_GROUPS} create_all_gather_group",
        f"{_SIZES} {_GROUPS} create_all_gather_group {_RANKS}",
        f"{_SIZES} {_GROUPS} {_RANKS}",
        f"{_SIZES} gtp_remat_size expert_gtp_remat_size {_GROUPS} {_RANKS}",
    ),
    "under a V one rank has both ends of the model; replicas have groups of their own",
)
def initialize_replicas(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Make the groups of replicated stages, and of a V's embedding and head."""
    stock = embed_on_one_rank(stock)
    replicas = replicated()
    if replicas is None:
        return stock(*args, **kwargs)
    call = bound(stock, *args, **kwargs)
    width = call.arguments["tensor_model_parallel_size"]
    call.arguments["local_world_size"] = width * replicas.stages
    stock(*call.args, **call.kwargs)
    groups, ranks = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, parallel_state._PIPELINE_GLOBAL_RANKS
    if isinstance(groups, list):  # Megatron lists the groups of a rank that is in several
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = groups[-1]
        parallel_state._PIPELINE_GLOBAL_RANKS = ranks[-1]
    # Megatron's own override of the size of the group: the training loop counts samples by it.
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = 1


def ranks_of_pipeline(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks that exchange messages: ``group``, Megatron's pipeline group of this rank.

    Where stages are replicated, they are all replicas of all stages, in their order.
    """
    replicas = replicated()
    if replicas is None:
        return dist.get_process_group_ranks(group)
    width = parallel_state.get_tensor_model_parallel_world_size()
    column = parallel_state.get_tensor_model_parallel_rank()
    return [rank * width + column for rank in range(replicas.ranks)]


@hook(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group",
    "self",
    "clipping where the ranks of a stage are in several pipelines",
)
def keep_statistics_in_replica(stock: Callable[..., Any], optimizer: Any) -> Any:
    """Give the optimizer a replica's tensor-parallel ranks for its sums over gradients.

    Stock gives it those of a pipeline; with clipping, 0.19 asks them whether layers have norms of their own.
    """
    return parallel_state.get_tensor_model_parallel_group() if replicated() else stock(optimizer)


def sum_over_replicas(model: Sequence[Any]) -> None:
    """Let reductions add up the gradients of a stage's replicas, where stock takes their mean.

    The loss is divided by the microbatches of all replicas, and a stage's gradients come from the replicas
    of the last one, whose number is another.
    """
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
