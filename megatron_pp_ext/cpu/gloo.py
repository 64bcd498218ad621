"""Process groups that are requested with nccl are made with gloo.

Megatron passes --distributed-backend to its first group only. Some of the groups that it makes later name
nccl themselves, and its barriers name the GPU to wait on, an argument that gloo does not take. Two functions
get here what Megatron gives them on a GPU: memory that stays until it is sent, and sizes that are numbers.
A third gathers parts of different sizes, as nccl does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.around import around
from megatron_pp_ext.cpu.torch_stubs import redirected

_OF_NCCL = ("device_id", "pg_options")
"""Arguments that bind a device, and nccl's options; gloo has none that Megatron sets."""


def _as_gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


@around
def _without_device_ids(barrier: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("device_ids", None)
    return barrier(*args, **kwargs)


@around
def _alias_what_is_sent(isend: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``isend`` to send an alias, which keeps the numbers in memory until they are sent.

    The interleaved schedule of Megatron 0.17 frees an output that gloo may still be reading; in 0.18 it
    waits.
    """
    return isend(tensor.detach(), *args, **kwargs)


@around
def _count_by_numbers(
    exchange: Callable[..., Any],
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap ``all_to_all_single``, which takes the sizes of its parts as numbers.

    Megatron counts the tokens of each expert in a tensor. It makes numbers of one that it moves from the GPU,
    and leaves one that is on the CPU as it is.
    """
    sizes = (_as_numbers(output_split_sizes), _as_numbers(input_split_sizes))
    return exchange(output, input, *sizes, *args, **kwargs)


def _as_numbers(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


@around
def _gather_unequal_parts(
    gather: Callable[..., Any],
    parts: list[torch.Tensor],
    own_part: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Wrap ``all_gather`` for parts of different sizes, by which Muon's replicas exchange their weights."""
    if async_op or len({part.shape for part in parts}) == 1:
        return gather(parts, own_part, group, async_op)
    parts[dist.get_rank(group)].copy_(own_part)
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)
    return None


def install() -> None:
    """Wrap the functions that make groups, the barrier, and three that exchange tensors."""
    for module in (dist, dist.distributed_c10d):
        for name, at in (("init_process_group", 0), ("new_group", 2)):
            make = getattr(dist.distributed_c10d, name)
            setattr(module, name, redirected(make, "backend", _as_gloo, at, drops=_OF_NCCL))
        module.barrier = _without_device_ids(dist.distributed_c10d.barrier)  # type: ignore
    dist.isend = dist.distributed_c10d.isend = _alias_what_is_sent(dist.isend)
    dist.all_to_all_single = dist.distributed_c10d.all_to_all_single = _count_by_numbers(
        dist.all_to_all_single
    )
    dist.all_gather = dist.distributed_c10d.all_gather = _gather_unequal_parts(dist.all_gather)
