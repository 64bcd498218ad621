"""The activations of this rank that wait on the host, with the memory that they may take there."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_pp_ext.features.offload.runtime.operations import ToDevice, ToHost
from megatron_pp_ext.integration.core.host_memory import counted_host_bytes, host_bytes, usable_bytes
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.runtime.activations_away import ActivationsAway
from megatron_pp_ext.runtime.copy_streams import CopyStreams
from megatron_pp_ext.runtime.first_rank import print_rank_0
from megatron_pp_ext.runtime.host_buffers import HostBuffers
from megatron_pp_ext.runtime.plan import RankPlan

SMALLEST = 1 << 20
"""The bytes of the smallest storage that is worth a copy."""

ENOUGH = 0.9
"""The part of the planned bytes that has to leave; with less, a rank warns."""


class HostActivations:
    """Moves activations, at most ``limit`` bytes of which are on the host, once a plan copies any.

    ``kept_bytes`` are those that a forward of each stage keeps, as the plans count them; empty where they are
    not known.
    """

    def __init__(self, limit: float, kept_bytes: Sequence[float] = ()) -> None:
        self._limit, self._kept = limit, kept_bytes
        self._away: ActivationsAway | None = None
        self._is_compared = False

    def before(self, plan: RankPlan) -> ActivationsAway | None:
        """Return what moves the activations of ``plan``; None where it copies none.

        Before the first step, memory is pinned for what the plan has on the host at once.
        """
        if not plan.has(ToHost):
            return None
        if self._away is None:
            self._away = ActivationsAway(HostBuffers(self._limit), CopyStreams(), SMALLEST)
            self._away.buffers.reserve(self._planned(plan)[1])
        return self._away

    def behind(self, plan: RankPlan) -> None:
        """Report what left in the first step that copied any, against what ``plan`` counted on."""
        if self._is_compared or self._away is None:
            return
        self._is_compared = True
        planned, sent, small = self._planned(plan)[0], self._away.sent_bytes, self._away.small_bytes
        line = f"{_gb(sent)} of this rank's activations went to the host in the first step"
        if not planned:
            print_rank_0(f"megatron_pp_ext: {line}; how many are planned is not known in bytes")
        elif sent >= ENOUGH * planned:
            print_rank_0(f"megatron_pp_ext: {line}, {sent / planned:.0%} of the {_gb(planned)} planned")
        else:
            _LOGGER.warning(
                "%s, only %.0f%% of the %s planned: %s are in storages under %d bytes, and others are held "
                "by more than the backward or had no room; the device keeps them beyond its planned memory",
                *(line, 100 * sent / planned, _gb(planned), _gb(small), SMALLEST),
            )

    def _planned(self, plan: RankPlan) -> tuple[float, float]:
        """Return the bytes that ``plan`` sends to the host in a step, and the most that are there at once."""
        sent = there = most = 0.0
        for operation in plan.operations if self._kept else ():
            if isinstance(operation, ToHost):
                sent += self._kept[operation.owner.stage]
                there += self._kept[operation.owner.stage]
                most = max(most, there)
            elif isinstance(operation, ToDevice):
                there -= self._kept[operation.owner.stage]
        return sent, most


def offloading(pipeline: Pipeline) -> StepPart:
    """Return what offloading brings to steps; collective over the job where activations are to leave."""
    is_counted = pipeline.request.offload is not None and pipeline.rehearsal is None
    free = counted_host_bytes() if is_counted else host_bytes()
    kept = pipeline.source.kept_bytes if pipeline.source else ()
    host = HostActivations(usable_bytes(pipeline.settings.offload_host_bytes, free), kept)

    @contextmanager
    def during(step: Step) -> Iterator[None]:
        away = host.before(step.plan)
        if away is not None:
            step.parts.append(away)
        yield
        host.behind(step.plan)

    return during


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


_LOGGER = logging.getLogger(__name__)
