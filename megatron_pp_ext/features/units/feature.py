"""Units that differ: microbatches in another order than the data's, and sequences in slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features.feature import Argument, Feature, OtherSums, ReadRequest, Rows

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.features.units.planner import Sliced, SliceVariants
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import Step, StepPart
    from megatron_pp_ext.schedule.costs import CostModel


class UnitPlanning(Feature):
    """``--pipeline-order``, and ``--pipeline-slice-tokens``: the order of units, and how they are cut."""

    name = "units"
    flags = Path(__file__).with_name("flags.toml")
    left_open = ("pipeline_slice_tokens",)
    asks = ("pipeline_order", "pipeline_slice_tokens", "pipeline_slice_check")
    sums = (
        OtherSums(
            "--pipeline-order", "gradients are summed in another order of microbatches", fp32=1e-5, lower=1e-1
        ),
        # In lower precision every slice rounds its part of a weight's gradient.
        OtherSums(
            "--pipeline-slice-tokens", "gradients are summed over slices of sequences", fp32=1e-5, lower=1e-1
        ),
    )
    refuses_models = True
    refuses_calls = True

    def read(self, job: RequestedJob, request: Request) -> Request:
        """See ``Feature``; a call's order is in the request already."""
        if job.flags.pipeline_order is None and job.pipeline.pipeline_slice_tokens is None:
            return request
        from megatron_pp_ext.features.units.options import read_order, read_slices

        return read_slices(job, read_order(job, request))

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments; ``lengths`` comes after the ``order`` that it is about."""
        from megatron_pp_ext.features.units import options

        return (
            Argument("order", options.with_order),
            Argument("lengths", options.with_lengths),
            Argument("slice_tokens", options.with_slices),
            Argument("slice_check", options.with_check),
        )

    def as_flags(self, request: Request) -> Mapping[str, Any]:
        from megatron_pp_ext.features.units.options import as_flags

        return as_flags(request)

    def chosen(
        self, job: RequestedJob, read: ReadRequest, rows: Rows, memory: float | None = None
    ) -> Mapping[str, Any]:
        """See ``Feature``: the length of slices, unless each step is planned by itself."""
        from megatron_pp_ext.schedule.entry import AUTO

        if job.pipeline.pipeline_slice_tokens != AUTO:
            return {}
        from megatron_pp_ext.features.units.options import are_by_length

        request = read(job)
        if are_by_length(request):
            return {}
        from megatron_pp_ext.features.units.costs import chosen

        return {"pipeline_slice_tokens": chosen(job, request, rows(), memory)}

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.units.rules import RULES

        return RULES

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        if not request.options:
            return before(request)
        from megatron_pp_ext.features.units.options import Slices, are_by_length

        option = request.option(Slices)
        if option is None or not (option.cuts or are_by_length(request)):
            return before(request)
        from megatron_pp_ext.features.units.sliced_orders import sliced

        return sliced(request, option, costs, before)

    def hooked(self) -> tuple[ModuleType, ...]:
        from megatron_pp_ext.features.units.megatron import context_parallel, mtp

        return context_parallel, mtp

    def data_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        """See ``Feature``; without options of features only steps whose messages vary in shape have any."""

        @cache
        def parts() -> tuple[StepPart, StepPart]:
            from megatron_pp_ext.features.units.megatron.agreement import announcing
            from megatron_pp_ext.features.units.megatron.steps import in_units

            return announcing(pipeline), in_units(pipeline)

        @contextmanager
        def where_shapes_vary(step: Step) -> Iterator[None]:
            with ExitStack() as stack:
                if not step.inputs.shape:
                    for part in parts():
                        stack.enter_context(part(step))
                yield

        return parts() if pipeline.request.options else (where_shapes_vary,)

    def addition(self) -> Sliced:
        from megatron_pp_ext.features.units.planner import Sliced

        return Sliced()

    def variants(self) -> SliceVariants:
        from megatron_pp_ext.features.units.planner import SliceVariants

        return SliceVariants()
