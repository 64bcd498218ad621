"""Slices: every sequence is cut, and its slices go through the pipeline one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features.feature import Argument, Feature, OtherSums, ReadRequest, Rows

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.features.slices.planner.estimates import Sliced
    from megatron_pp_ext.integration.requested import Pipeline
    from megatron_pp_ext.integration.runners.step_parts import StepPart
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.schedule.costs import CostModel


class Slicing(Feature):
    """``--pipeline-slice-tokens``: slices of so many tokens, or of as many as make the step shortest."""

    name = "slices"
    flags = Path(__file__).with_name("flags.toml")
    left_open = ("pipeline_slice_tokens",)
    # In lower precision every slice rounds its part of a weight's gradient.
    sums = OtherSums(
        "--pipeline-slice-tokens", "gradients are summed over slices of sequences", fp32=1e-5, lower=1e-1
    )
    refuses_models = True
    refuses_calls = True

    def read(self, job: RequestedJob, request: Request) -> Request:
        if job.pipeline.pipeline_slice_tokens is None:
            return request
        from megatron_pp_ext.features.slices.options import read

        return read(job, request)

    def arguments(self) -> tuple[Argument, ...]:
        from megatron_pp_ext.features.slices.options import read_argument, read_check

        return Argument("slice_tokens", read_argument), Argument("slice_check", read_check)

    def as_flags(self, request: Request) -> Mapping[str, Any]:
        from megatron_pp_ext.features.slices.options import as_flags

        return as_flags(request)

    def chosen(self, job: RequestedJob, read: ReadRequest, rows: Rows) -> Mapping[str, Any]:
        """See ``Feature``: the length of slices, unless each step is planned by itself."""
        from megatron_pp_ext.schedule.names import AUTO

        if job.pipeline.pipeline_slice_tokens != AUTO:
            return {}
        from megatron_pp_ext.features.slices.options import are_by_length

        request = read(job)
        if are_by_length(request):
            return {}
        from megatron_pp_ext.features.slices.costs.choice import chosen

        return {"pipeline_slice_tokens": chosen(job, request, rows())}

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.slices.rules import RULES

        return RULES

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        from megatron_pp_ext.features.slices.options import Slices

        option = request.option(Slices)
        if option is None or option.count == 1:
            return before(request)
        from megatron_pp_ext.features.slices.order import sliced

        return sliced(request, option, costs, before)

    def data_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        from megatron_pp_ext.features.slices.options import Slices

        option = pipeline.request.option(Slices)
        if option is None:
            return
        from megatron_pp_ext.features.slices.megatron.steps import sliced

        yield sliced(pipeline, option)

    def addition(self) -> Sliced:
        from megatron_pp_ext.features.slices.planner.estimates import Sliced

        return Sliced()
