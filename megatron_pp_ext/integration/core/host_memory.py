"""The memory of the host that activations of this rank may take."""

import os

import psutil

USED = 0.5
"""The part of the host's free memory that activations may take where nobody says how much."""


def host_bytes() -> int:
    """Return this rank's share of the memory that its machine has free."""
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def usable_bytes(limit: float | None) -> float:
    """Return the bytes of the host that activations of a rank may take: ``limit``, or the default for None.

    ``limit`` is --pipeline-offload-host-bytes.  ValueError where the host has not that much free.
    """
    free = host_bytes()
    if limit is None:
        return USED * free
    if limit > free:
        raise ValueError(
            f"--pipeline-offload-host-bytes is {limit:.0f}, but this machine has {free} bytes free for each "
            "of its ranks: lower it"
        )
    return limit
