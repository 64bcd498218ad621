"""The memory that the devices of a job have free."""

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.integration.core.host_memory import host_bytes

DEVICE_MARGIN = 0.9
"""The part of the free memory that ``auto`` uses: allocators fragment, and kernels need workspace."""


def free_bytes_by_rank() -> list[float]:
    """Return the free bytes for a step on each pipeline rank's fullest device, less a margin; collective.

    All ranks of the job take part, not only a pipeline's, since ranks that share a stage's tensors
    must run the same schedule.  Call it right after an optimizer step, when weights, gradients and optimizer
    state are allocated and activations and messages are not.
    """
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    lowest = torch.full([ranks], math.inf, dtype=torch.float64, device="cuda")
    lowest[parallel_state.get_pipeline_model_parallel_rank()] = free_bytes()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return [DEVICE_MARGIN * free for free in lowest.tolist()]


def free_bytes() -> int:
    """The bytes that this rank's device has left; on a CPU its share of the machine's free memory."""
    if torch.accelerator.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return host_bytes()
