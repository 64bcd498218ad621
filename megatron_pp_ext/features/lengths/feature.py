"""Orders by lengths: microbatches whose documents differ in length run in another order than the data's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features.feature import Argument, Feature, OtherSums

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.integration.requested import Pipeline
    from megatron_pp_ext.integration.runners.step_parts import StepPart
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules


class Lengths(Feature):
    """``--pipeline-order``: by the rule of the schedule, or as a search finds."""

    name = "lengths"
    flags = Path(__file__).with_name("flags.toml")
    sums = OtherSums(
        "--pipeline-order", "gradients are summed in another order of microbatches", fp32=1e-5, lower=1e-1
    )
    refuses_models = True

    def read(self, job: RequestedJob, request: Request) -> Request:
        """See ``Feature``; a call's order is in the request already."""
        how = job.flags.pipeline_order
        if how is None or request.is_stock:
            return request
        from megatron_pp_ext.features.lengths.ordering import Ordering

        if request.option(Ordering) is not None:
            return request
        file = job.pipeline.pipeline_costs
        return request.with_option(
            Ordering(how, costs_from="" if file is None else f"--pipeline-costs {file}")
        )

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments; ``lengths`` comes after the ``order`` that it is about."""
        from megatron_pp_ext.features.lengths.ordering import with_lengths, with_order

        return Argument("order", with_order), Argument("lengths", with_lengths)

    def as_flags(self, request: Request) -> Mapping[str, Any]:
        from megatron_pp_ext.features.lengths.ordering import Ordering

        ordering = request.option(Ordering)
        return {"pipeline_order": None if ordering is None else ordering.how}

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.lengths.rules import RULES

        return RULES

    def data_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        from megatron_pp_ext.features.lengths.megatron.announced_shapes import announcing
        from megatron_pp_ext.features.lengths.megatron.steps import ordered

        yield announcing(pipeline)
        yield ordered(pipeline)
