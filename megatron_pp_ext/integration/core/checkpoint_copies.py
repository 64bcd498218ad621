"""The two copies of a tied weight, which stock never has on one rank, in a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.runtime.storages import plain_tensors


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
