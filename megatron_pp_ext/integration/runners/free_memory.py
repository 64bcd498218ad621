"""The memory that the devices of a job have free."""

import os

import psutil
import torch
import torch.distributed as dist

DEVICE_MARGIN = 0.9
"""The part of the free memory that ``auto`` uses: allocators fragment, and kernels need room."""


def least_free_bytes() -> float:
    """The bytes that the fullest device of the job has left for a step, less the margin; collective.

    All ranks of the job take part, not only those of a pipeline, since ranks that share a stage's tensors
    must run the same schedule.  Call it right after an optimizer step, when weights, gradients and optimizer
    state are allocated and activations and messages are not.
    """
    lowest = torch.tensor([free_bytes()], dtype=torch.float64, device="cuda")
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return DEVICE_MARGIN * float(lowest.item())


def free_bytes() -> int:
    """The bytes that this rank's device has left; on a CPU its share of the machine's free memory."""
    if torch.accelerator.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
