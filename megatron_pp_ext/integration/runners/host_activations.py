"""The activations of this rank that wait on the host, with the memory that they may take there."""

from megatron_pp_ext.integration.runners.free_memory import host_bytes
from megatron_pp_ext.runtime.activations_away import ActivationsAway
from megatron_pp_ext.runtime.copy_streams import CopyStreams
from megatron_pp_ext.runtime.host_buffers import HostBuffers

SMALLEST = 1 << 20
"""The bytes of the smallest storage that is worth a copy."""

USED = 0.5
"""The part of the host's free memory that activations may take where nobody says how much."""


def activations_away(limit: float | None) -> ActivationsAway:
    """Return what moves activations, which never take more than ``limit`` bytes of the host.

    ``limit`` is --pipeline-offload-host-bytes, of each rank; None stands for the default.  ValueError where
    the host has not that much free.
    """
    free = host_bytes()
    if limit is not None and limit > free:
        raise ValueError(
            f"--pipeline-offload-host-bytes is {limit:.0f}, but this machine has {free} bytes free for each "
            "of its ranks: lower it"
        )
    return ActivationsAway(HostBuffers(USED * free if limit is None else limit), CopyStreams(), SMALLEST)
