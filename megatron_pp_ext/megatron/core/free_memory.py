"""The memory that devices have free, and that of the host which a rank may take."""

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
BOOT = Path("/proc/sys/kernel/random/boot_id")

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A cgroup's limit, what it uses, and the part of that which the kernel gives up first: version 2, and 1."""


def host_bytes() -> int:
    """Return this rank's part of the free memory by the number of ranks that its launcher reports here.

    Where it does not report it (LOCAL_WORLD_SIZE), all ranks of the job may be.

    A process that takes more than its cgroup allows, such as a container's or a batch job's, is killed,
    however much the machine has.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return min(_pools().values()) // int(ranks)


def counted_host_bytes() -> int:
    """Return this rank's part of the free memory by counting the ranks that share it; collective."""
    pools = _pools()
    pools_of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(pools_of_ranks, [*pools])
    return min(free // sum(pool in names for names in pools_of_ranks) for pool, free in pools.items())


def _pools() -> dict[str, int]:
    """Return the free bytes of the machine and of the limited cgroups that this process is in.

    Their names are the same for all processes that share them.
    """
    machine = BOOT.read_text().strip() if BOOT.exists() else platform.node()
    pools = {machine: psutil.virtual_memory().available}
    for folder in _cgroups():
        for limit, usage, reclaimed in _FILES:
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = int(most) - int((folder / usage).read_text()) + int(fields.get(reclaimed, 0))
                pools[f"{machine} {folder.stat().st_ino}"] = max(0, free)
    return pools


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's cgroup that controls memory, and of its parents."""
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        # A container may see the path that its cgroup has outside, where its own root is the cgroup itself.
        cgroup = Path(os.path.normpath(f"{root}/{path}"))
        around = (folder for folder in (cgroup, *cgroup.parents) if folder.is_relative_to(root))
        yield from (folder for folder in dict.fromkeys((*around, root)) if folder.exists())


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
