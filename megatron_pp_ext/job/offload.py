"""What --pipeline-offload, or ``install(offload=)``, requests."""

from dataclasses import replace

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job import memory_limit
from megatron_pp_ext.schedule.names import AUTO


def requested(
    request: Request,
    given: float | str,
    limit: float | str | None,
    name: str = "--pipeline-offload",
    limit_names: memory_limit.Names = memory_limit.BY_FLAG,
) -> Request:
    """Return ``request`` with what is ``given`` as ``name``, and with the ``limit`` that copies have to keep.

    ValueError, in one line, for a share that is not above 0 and at most 1.
    """
    if given == AUTO:
        if limit is not None and request.limit is None:
            request = replace(request, limit=memory_limit.read(limit, request.ranks, limit_names))
        return replace(request, offload=AUTO)
    try:
        share = 0.0 if isinstance(given, bool) else float(given or 0)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{name} is {given}, but must be a share above 0 and at most 1, or {AUTO}; give one, such as 0.5"
        )
    return replace(request, offload=share)
