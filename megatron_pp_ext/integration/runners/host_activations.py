"""The activations of this rank that wait on the host, with the memory that they may take there."""

from megatron_pp_ext.integration.core.host_memory import usable_bytes
from megatron_pp_ext.runtime.activations_away import ActivationsAway
from megatron_pp_ext.runtime.copy_streams import CopyStreams
from megatron_pp_ext.runtime.host_buffers import HostBuffers

SMALLEST = 1 << 20
"""The bytes of the smallest storage that is worth a copy."""


def activations_away(limit: float | None) -> ActivationsAway:
    """Return what moves activations, which never take more than ``usable_bytes`` of the host."""
    return ActivationsAway(HostBuffers(usable_bytes(limit)), CopyStreams(), SMALLEST)
