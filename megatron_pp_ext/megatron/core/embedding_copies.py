"""The copies of the embedding that one model has: equal at the start, one gradient for all, written once.

A tied output weight is a copy, and multi-token prediction (MTP) embeds its tokens by another one.  Stock does
this across the ranks of its embedding group.  Under a V the embedding and the output head are on one rank,
where no group reaches them, and groups that are older than the schedule leave out the rank that predicts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_pp_ext.around import around, bound
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.runtime.activation_meter import plain_tensors
from megatron_pp_ext.runtime.groups import wire_of


@around
def embed_on_one_rank(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let a pipeline's embedding group be the rank with a V's embedding and head, and the one with MTP.

    Scripts may pass ranks of their own for that group to ``initialize_model_parallel``; with another rank in
    it, the one with the embedding would wait for that for ever.
    """
    pipeline = requested.pipeline()
    call = bound(stock, *args, **kwargs)
    if pipeline is not None and pipeline.has_embedding_with_head:
        call.arguments["get_embedding_ranks"] = _embedding_ranks
    return stock(*call.args, **call.kwargs)


def _embedding_ranks(pp_ranks: list[int]) -> list[int]:
    pipeline = requested.require()
    predicting = _predicting_in_group(pipeline)
    return sorted(
        {
            pp_ranks[pipeline.embedding_rank],
            pp_ranks[pipeline.embedding_rank if predicting is None else predicting],
        }
    )


def _predicting_in_group(pipeline: Pipeline) -> int | None:
    """Return the rank whose copy, for MTP, is in Megatron's embedding group; or None.

    Groups may be older than a schedule that a call installs.  And Megatron takes the last rank of the group
    for one with the output layer alone (``LanguageModule._is_in_embd_group``), so that under a V with both
    there the group is that rank.
    """
    if pipeline.predicting is None or pipeline.placement.ends_on_last:
        return None
    return pipeline.placement.rank_of(pipeline.predicting)


def tie_embeddings(chunks: Sequence[torch.nn.Module]) -> None:
    """Start copies of the embedding, which stock leaves at zero, with its values; collective over a pipeline.

    Stock fills them by an all-reduce over its embedding group; under a V both are on one rank.
    """
    pipeline = requested.require()
    if not pipeline.has_embedding_with_head:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    tied = _tied_weights(chunks, group.rank() == pipeline.embedding_rank)
    if tied is not None:
        first, last = tied
        last.data.copy_(first.data)
    if link := _link(chunks, pipeline, group):
        link.broadcast(link.weight.data)


def _tied_weights(chunks: Sequence[torch.nn.Module], has_embedding: bool) -> tuple[Any, Any] | None:
    """Return the weights of the first and the last stage on the rank that has both, if they are copies."""
    if not has_embedding:
        return None
    first, last = map(_model, (chunks[0], chunks[-1]))
    shares = getattr(first, "share_embeddings_and_output_weights", False)
    if not shares and not getattr(last, "mtp_process", False):  # which embeds the tokens there as well
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def _model(chunk: torch.nn.Module) -> Any:
    return get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)


@hook(
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
    "model config embd_group pp_group",
    "copies of the embedding in places that stock does not look at",
)
def sum_tied_gradients(
    stock: Callable[..., None], model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Add up the gradients of the embedding's copies under a V.

    Stock sums them across ranks here: after data-parallel reduction and before the division by tokens.  So
    the arithmetic is stock's own.  A third copy, that of MTP in a stage of another rank,
    is summed in between: by stock where it is in Megatron's group, else over a link of its own.  Otherwise
    stock is not called: Megatron's group may be older than the schedule, and have the last rank in it.
    """
    pipeline = chunk_pipelines.of_model(model)
    if pipeline is None or not pipeline.has_embedding_with_head:
        return stock(model, *args, **kwargs)
    group = parallel_state.get_pipeline_model_parallel_group()
    tied = _tied_weights(model, group.rank() == pipeline.embedding_rank) or ()
    gradients = [getattr(weight, "main_grad", None) for weight in tied]
    present = [gradient for gradient in gradients if gradient is not None]  # none of a frozen embedding
    if len(present) == 2:
        present[0].add_(present[1])
    if _predicting_in_group(pipeline) not in (None, pipeline.embedding_rank):
        stock(model, *args, **kwargs)
    link = _link(model, pipeline, group)
    if link and (gradient := getattr(link.weight, "main_grad", None)) is not None:
        link.sum(gradient)
    if len(present) == 2:
        present[1].copy_(present[0])


class _Tie:
    """Takes a copy's numbers between the rank of ``group`` that ``has_embedding`` and a ``peer``.

    This rank's copy is ``weight``.
    """

    def __init__(self, weight: Any, group: dist.ProcessGroup, has_embedding: bool, peer: int) -> None:
        self.weight, self._group, self._has_embedding = weight, group, has_embedding
        self._peer = dist.get_process_group_ranks(group)[peer]
        self._wire = wire_of(group, weight.device)

    def sum(self, numbers: torch.Tensor) -> None:
        if self._has_embedding:
            numbers.add_(self._received(numbers))
        else:
            self._send(numbers)
        self.broadcast(numbers)

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Give the other rank the ``numbers`` of the one that has the embedding."""
        if self._has_embedding:
            self._send(numbers)
        else:
            numbers.copy_(self._received(numbers))

    def _send(self, numbers: torch.Tensor) -> None:
        dist.send(numbers.to(self._wire), self._peer, group=self._group)

    def _received(self, numbers: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(numbers, device=self._wire)
        dist.recv(received, self._peer, group=self._group)
        return received.to(numbers.device)


def _link(chunks: Sequence[torch.nn.Module], pipeline: Pipeline, group: dist.ProcessGroup) -> _Tie | None:
    """Return the link between the first stage's copy and that of MTP on another rank.

    None on other ranks, and where Megatron's group has both (``_embedding_ranks``).
    """
    config = get_model_config(chunks[0])
    if _predicting_in_group(pipeline) is not None or not config.mtp_num_layers:
        return None
    from megatron_pp_ext.job import layers
    from megatron_pp_ext.job.model_config import arguments
    from megatron_pp_ext.job.typed_job import Job

    placement = pipeline.placement
    predicting = layers.predicting_stage(Job.of(arguments(config)), placement.stages)
    assert predicting is not None
    home, other = pipeline.embedding_rank, placement.rank_of(predicting)
    if other == home or group.rank() not in (home, other):
        return None
    has_embedding = group.rank() == home
    copy = chunks[0 if has_embedding else -1]  # Megatron predicts in a rank's last chunk alone
    weight = _model(copy).shared_embedding_or_output_weight()
    return _Tie(weight, group, has_embedding, other if has_embedding else home)


@hook(
    "megatron.core.dist_checkpointing.strategies.fully_parallel"
    ":distribute_main_replicas_with_precomputed_distribution",
    "sharded_state_dict parallelization_group precomputed_distribution",
    "checkpoints of tied weights whose two copies are on one rank",
)
def write_copies_once(stock: Callable[..., None], sharded_state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Let a rank that holds a tensor twice write it once.

    Under a V both copies of a tied weight, and of its optimizer state, are on one rank.  Stock
    shares the writing out among data-parallel ranks by the tensors' names and makes every copy on the
    chosen rank the one to write, then refuses to write a tensor twice.
    """
    stock(sharded_state_dict, *args, **kwargs)
    places = set()
    for shard in nested_values(sharded_state_dict):
        # Stock marks a tensor that this rank is to write with 0, any other with 1.
        if isinstance(shard, ShardedTensor) and shard.replica_id == 0:
            place = _sharded_tensor_shard_id(shard)
            shard.replica_id = int(place in places)
            places.add(place)


def separate_copies(state: dict[str, Any]) -> None:
    """Clone tensors that are in ``state`` twice, as --ckpt-fully-parallel-load leaves them.

    The optimizer uses its state as it is loaded, so two tied weights would update the same moments.
    """
    places = set()

    def separate(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return value
        place = tuple(tensor.data_ptr() for tensor in plain_tensors(value))
        if place in places:
            return value.clone()
        places.add(place)
        return value

    dict_list_map_inplace(separate, state)
