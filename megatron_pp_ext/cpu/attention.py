"""Let Megatron's own attention run under context parallelism.

With --context-parallel-size n, rank r holds two of the 2n pieces of a sequence, r and 2n - 1 - r, so that
causal attention is the same work for all ranks. Only Transformer Engine's attention looks beyond these
pieces. On a CPU the keys and values of all ranks are gathered instead, which takes the memory that context
parallelism is there to save. A mask of the batch gets its columns in the order of the gathered pieces; where
there is none, it follows from their positions.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_pp_ext.around import around


@around
def accept_context_parallelism(
    make: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Make the attention of a model that is not context-parallel.

    ValueError for any other attention than the plain causal one, since its mask is not known here.
    """
    if config.context_parallel_size == 1:
        make(self, config, *args, **kwargs)
        return
    plain = copy.copy(config)
    plain.context_parallel_size = 1
    make(self, plain, *args, **kwargs)
    if self.attn_mask_type.name != "causal" or self.scale_mask_softmax.window_size is not None:
        raise ValueError(
            f"--context-parallel-size {config.context_parallel_size} on a CPU is for causal attention "
            "without a window; set it to 1, or leave the window out"
        )


@around
def attend_to_all_ranks(
    attend: Callable[..., Any],
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give this rank's queries (sequence, batch, heads, head) the keys and values of all ranks."""
    group = getattr(self.pg_collection, "cp", None)
    if group is not None and group.size() > 1:
        # Megatron's gather along the first dimension, whose gradients are summed over the ranks.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        places = _places(query.size(0), group)
        attention_mask = (
            # A batch has the rows of this rank's queries, and a column for each key in its true place.
            _beyond(places, group) if attention_mask is None else attention_mask[..., places.flatten()]
        )
    return attend(self, query, key, value, attention_mask, *args, **kwargs)


def _places(length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the places (ranks, length) in the sequence of the tokens that each rank holds."""
    early, late = torch.arange(group.size() * length).view(2 * group.size(), -1).chunk(2)
    return torch.cat([early, late.flip(0)], dim=1)


def _beyond(places: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mask (1, 1, queries, keys) of the gathered keys that come after each query of this rank."""
    return (places.flatten() > places[group.rank()].unsqueeze(1)).unsqueeze(0).unsqueeze(0)
