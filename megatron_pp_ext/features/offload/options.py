"""What --pipeline-offload, or ``install(offload=)``, requests."""

from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.job import memory_limit
from megatron_pp_ext.schedule.names import AUTO


@dataclass(frozen=True, slots=True)
class Offload(Option):
    """The request for activations that wait on the host.

    ``share`` is the part of all activations, above 0 and at most 1, or ``auto``: as few as keep the memory
    limit, and without one as many as cost no time.  ``host_bytes`` are those of the host that the activations
    of a rank may take, None for its part of half of what is free.
    """

    share: float | str
    host_bytes: float | None = None


def requested(
    request: Request,
    given: float | str,
    limit: float | str | None,
    name: str = "--pipeline-offload",
    limit_names: memory_limit.Names = memory_limit.BY_FLAG,
    host_bytes: float | None = None,
) -> Request:
    """Return ``request`` with what is ``given`` as ``name``, and with the ``limit`` that copies have to keep.

    ValueError, in one line, for a share that is not above 0 and at most 1.
    """
    if given == AUTO:
        if limit is not None and request.limit is None:
            request = replace(request, limit=memory_limit.read(limit, request.ranks, limit_names))
        return request.with_option(Offload(AUTO, host_bytes))
    try:
        share = 0.0 if isinstance(given, bool) else float(given or 0)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{name} is {given}, but must be a share above 0 and at most 1, or {AUTO}; give one, such as 0.5"
        )
    return request.with_option(Offload(share, host_bytes))


def of_call(request: Request, value: float | str, limit: float | str | None) -> Request:
    """Return ``request`` with what the argument ``offload`` of ``install`` asks for."""
    return requested(request, value, limit, "offload", memory_limit.BY_CALL)
