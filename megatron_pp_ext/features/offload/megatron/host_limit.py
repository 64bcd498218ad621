"""The memory of the host that the offloaded activations of a rank may take."""

import os

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.offload.options import Offload
from megatron_pp_ext.integration.core.host_memory import host_bytes
from megatron_pp_ext.setting_error import SettingError

USED = 0.5
"""The part of the host's free memory that activations may take where no limit is given."""


def usable_bytes(limit: float | None, free: int) -> float:
    """Return the bytes of the host that activations of a rank may take: ``limit``, or the default for None.

    ``limit`` is --pipeline-offload-host-bytes.  ValueError where it is more than the ``free`` bytes.
    """
    if limit is None:
        return USED * free
    if limit > free:
        raise SettingError(
            f"--pipeline-offload-host-bytes is {limit:.0f}, but this machine has {free} bytes free for each "
            "of its ranks: lower it"
        )
    return limit


def require_free(request: Request) -> None:
    """Raise ValueError where the limit of ``request`` is more than this machine has free for each rank."""
    option = request.option(Offload)
    # Without the launcher's number of ranks they are counted once they can be, before the first step.
    if option is not None and option.host_bytes is not None and "LOCAL_WORLD_SIZE" in os.environ:
        usable_bytes(option.host_bytes, host_bytes())
