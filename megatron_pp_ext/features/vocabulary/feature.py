"""The shared vocabulary: every rank has an equal part of the embedding and of the output layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features.feature import Argument, Feature, OtherSums

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Option, Request
    from megatron_pp_ext.features.vocabulary.runtime.operations import PartOfRank
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import StepPart
    from megatron_pp_ext.runtime.operations import RankOrder
    from megatron_pp_ext.schedule.costs import CostModel
    from megatron_pp_ext.schedule.placement import Placement


class VocabularyParallelism(Feature):
    """``--pipeline-vocabulary``: the head is split over the ranks (``Request.splits_head``)."""

    name = "vocabulary"
    flags = Path(__file__).with_name("flags.toml")
    left_open = ("pipeline_vocabulary",)
    asks = ("pipeline_vocabulary",)
    # The parts of the hidden state's gradient are rounded before they are summed.
    sums = (
        OtherSums(
            "--pipeline-vocabulary",
            "each rank sums over its part of a shared vocabulary",
            fp32=1e-5,
            lower=1e-1,
        ),
    )
    refuses_models = True

    def read(self, job: RequestedJob, request: Request) -> Request:
        if job.pipeline.pipeline_vocabulary is None:
            return replace(request, splits_head=False)
        from megatron_pp_ext.features.vocabulary.options import permitted, with_vocabulary

        return with_vocabulary(request, permitted(job))

    def arguments(self) -> tuple[Argument, ...]:
        from megatron_pp_ext.features.vocabulary.options import with_vocabulary

        return (Argument("vocabulary", lambda request, value, limit: with_vocabulary(request, value)),)

    def as_flags(self, request: Request) -> Mapping[str, Any]:
        from megatron_pp_ext.features.vocabulary.options import as_flag

        return {"pipeline_vocabulary": as_flag(request)}

    def permitted(self, job: RequestedJob) -> Mapping[str, Any]:
        from megatron_pp_ext.features.vocabulary.options import permitted

        return {"pipeline_vocabulary": permitted(job)}

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.vocabulary.rules import RULES

        return RULES

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        if request.splits_head is False:
            return before(request)
        from megatron_pp_ext.features.vocabulary.order import shared

        return shared(request, costs, before)

    def completed(self, request: Request, result: Made) -> Made:
        """See ``Feature``: a frozen output layer has no weight gradients.

        Copies to the host were planned with them, before it was known that there are none.
        """
        if not request.options:
            return result
        from megatron_pp_ext.features.vocabulary.options import FrozenOutput

        if request.option(FrozenOutput) is None:
            return result
        from megatron_pp_ext.features.vocabulary.order import without_frozen_weight

        return without_frozen_weight(result)

    def extension(self, order: RankOrder) -> PartOfRank | None:
        from megatron_pp_ext.schedule.actions import Kind

        if all(action.kind is not Kind.S for action in order.order):
            return None
        from megatron_pp_ext.features.vocabulary.runtime.operations import PartOfRank

        return PartOfRank(order.stages)

    def finish_chunks(self, chunks: Sequence[Any], pipeline: Pipeline) -> None:
        if not pipeline.placement.splits_head:
            return
        from megatron_pp_ext.features.vocabulary.megatron.dealing import deal_out

        deal_out(chunks, pipeline)

    def model_option(self, model: Sequence[Any], placement: Placement) -> Option | None:
        if not placement.splits_head:
            return None
        from megatron_pp_ext.features.vocabulary.megatron.dealing import frozen_output

        return frozen_output(model)

    def step_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        if pipeline.placement.splits_head:
            from megatron_pp_ext.features.vocabulary.megatron.model_vocabulary import shared

            yield shared
