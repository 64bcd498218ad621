"""Offloaded activations: some of them wait for their backward on the host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp_ext.features.feature import Argument, Feature

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.features.offload.planner import Offloaded, OnHost
    from megatron_pp_ext.features.offload.runtime.operations import CopiesOfRank
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import StepPart
    from megatron_pp_ext.runtime.operations import RankOrder
    from megatron_pp_ext.schedule.costs import CostModel


class Offloading(Feature):
    """``--pipeline-offload``: a share of the activations, or as few as keep the memory limit."""

    name = "offload"
    flags = Path(__file__).with_name("flags.toml")
    asks = ("pipeline_offload", "pipeline_offload_host_bytes")

    def read(self, job: RequestedJob, request: Request) -> Request:
        flags = job.pipeline
        if flags.pipeline_offload is None:
            return request
        from megatron_pp_ext.features.offload.order import with_offload

        limit, host_bytes = flags.pipeline_memory_limit, flags.pipeline_offload_host_bytes
        return with_offload(request, flags.pipeline_offload, limit, host_bytes=host_bytes)

    def arguments(self) -> tuple[Argument, ...]:
        from megatron_pp_ext.features.offload.order import of_call
        from megatron_pp_ext.schedule.entry import AUTO

        return (Argument("offload", of_call, lambda value: value == AUTO),)

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.offload.rules import RULES

        return RULES

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        if not request.options:
            return before(request)
        from megatron_pp_ext.features.offload.order import OffloadRequest

        option = request.option(OffloadRequest)
        if option is None:
            return before(request)
        from megatron_pp_ext.features.offload.order import offloaded

        return offloaded(request, option, costs, before)

    def extension(self, order: RankOrder) -> CopiesOfRank | None:
        if not order.copies:
            return None
        from megatron_pp_ext.features.offload.runtime.operations import CopiesOfRank

        return CopiesOfRank(order)

    def require_possible(self, request: Request) -> None:
        if request.options:
            from megatron_pp_ext.features.offload.megatron import require_free

            require_free(request)

    def step_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        if pipeline.request.options:
            from megatron_pp_ext.features.offload.megatron import offloading

            yield offloading(pipeline)

    def addition(self) -> Offloaded:
        from megatron_pp_ext.features.offload.planner import Offloaded

        return Offloaded()

    def variants(self) -> OnHost:
        from megatron_pp_ext.features.offload.planner import OnHost

        return OnHost()
