"""What offloading brings to the steps of a model: what moves activations, within the memory of the host."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.features.offload.runtime.host_buffers import CopyStreams, HostBuffers
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.features.offload.runtime.operations import OffloadCopy, Reload
from megatron_pp_ext.megatron.core.free_memory import counted_host_bytes, host_bytes
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import Step, StepPart
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.rank import print_rank_0
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
    option = request.option(OffloadRequest)
    # Without the launcher's number of ranks they are counted once they can be, before the first step.
    if option is not None and option.host_bytes is not None and "LOCAL_WORLD_SIZE" in os.environ:
        usable_bytes(option.host_bytes, host_bytes())


SMALLEST = 1 << 20
"""The bytes of the smallest storage that is worth a copy."""

ENOUGH = 0.9
"""The part of the planned bytes that has to be offloaded; with less, a rank warns."""


class HostActivations:
    """Moves activations, at most ``limit`` bytes of which are on the host, once a plan copies any.

    ``kept_bytes`` are the bytes that a forward of each stage keeps in the plans; empty where they are
    not known.
    """

    def __init__(self, limit: float, kept_bytes: Sequence[float] = ()) -> None:
        self._limit, self._kept = limit, kept_bytes
        self._offloaded: OffloadedActivations | None = None
        self._is_compared = False

    def before(self, plan: RankPlan) -> OffloadedActivations | None:
        """Return the copies of activations that ``plan`` needs; None without any.

        Before the first step, memory is pinned for the most activations that the plan has on the host.
        """
        if not plan.has(OffloadCopy):
            return None
        if self._offloaded is None:
            self._offloaded = OffloadedActivations(HostBuffers(self._limit), CopyStreams(), SMALLEST)
            self._offloaded.buffers.reserve(self._planned(plan)[1])
        return self._offloaded

    def after(self, plan: RankPlan) -> None:
        """Report the bytes of the first step with copies, against the bytes that ``plan`` counted on."""
        if self._is_compared or self._offloaded is None:
            return
        self._is_compared = True
        planned, copied, small = (
            self._planned(plan)[0],
            self._offloaded.offloaded_bytes,
            self._offloaded.small_bytes,
        )
        line = f"{_gb(copied)} of this rank's activations went to the host in the first step"
        if not planned:
            print_rank_0(f"megatron_pp_ext: {line}; how many are planned is not known in bytes")
        elif copied >= ENOUGH * planned:
            print_rank_0(f"megatron_pp_ext: {line}, {copied / planned:.0%} of the {_gb(planned)} planned")
        else:
            _LOGGER.warning(
                "%s, only %.0f%% of the %s planned: %s are in storages under %d bytes, and others are held "
                "by more than the backward or had no room; the device keeps them beyond its planned memory",
                *(line, 100 * copied / planned, _gb(planned), _gb(small), SMALLEST),
            )

    def _planned(self, plan: RankPlan) -> tuple[float, float]:
        """Return the bytes that ``plan`` sends to the host in a step, and the most that are there at once."""
        total = on_host = most = 0.0
        for operation in plan.operations if self._kept else ():
            if isinstance(operation, OffloadCopy):
                total += self._kept[operation.owner.stage]
                on_host += self._kept[operation.owner.stage]
                most = max(most, on_host)
            elif isinstance(operation, Reload):
                on_host -= self._kept[operation.owner.stage]
        return total, most


def offloading(pipeline: Pipeline) -> StepPart:
    """Return the part of a step that offloads activations; collective over the job where it is requested."""
    option = pipeline.request.option(OffloadRequest)
    is_counted = option is not None and pipeline.rehearsal is None
    free = counted_host_bytes() if is_counted else host_bytes()
    stage_bytes = pipeline.source.kept_bytes if pipeline.source else ()
    host = HostActivations(usable_bytes(option.host_bytes if option else None, free), stage_bytes)

    @contextmanager
    def during(step: Step) -> Iterator[None]:
        offloaded = host.before(step.plan)
        if offloaded is not None:
            step.parts.append(offloaded)
        try:
            yield
        except BaseException:
            if offloaded is not None:
                offloaded.abandon()
            raise
        host.after(step.plan)

    return during


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


_LOGGER = logging.getLogger(__name__)
