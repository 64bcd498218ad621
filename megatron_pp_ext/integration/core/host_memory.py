"""The host memory that a rank may take: its part of the machine's and its cgroups' free memory.

A process that takes more than its cgroup allows, such as a container's or a batch job's, is killed, however
much the machine has.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch.distributed as dist

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
