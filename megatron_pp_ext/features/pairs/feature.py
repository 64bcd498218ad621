"""Pairs: a forward and a backward that run together, each computing while the other communicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.features.feature import Checks, Feature

if TYPE_CHECKING:
    from types import ModuleType

    from megatron_pp_ext.compiler.bounds import Cut
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.features.pairs.runtime import PairsOfRank
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import StepPart
    from megatron_pp_ext.runtime.operations import RankOrder
    from megatron_pp_ext.schedule.costs import CostModel, Costs
    from megatron_pp_ext.schedule.simulate import Timeline


class Pairing(Feature):
    """``--overlap-moe-expert-parallel-comm``, which is Megatron's own flag."""

    name = "pairs"
    asks = ("overlap_moe_expert_parallel_comm",)
    refuses_models = True

    def is_asked(self, job: RequestedJob) -> bool:
        """See ``Feature``; a file may have pairs."""
        return super().is_asked(job) or (job.from_file is not None and bool(job.from_file.paired))

    def read(self, job: RequestedJob, request: Request) -> Request:
        """See ``Feature``: Megatron's own 1F1B has no place for pairs."""
        has_place = request.ranks == 1 or not request.is_stock or request.placement.chunks > 1
        if not (job.parallel.overlap_moe_expert_parallel_comm and has_place):
            return request
        from megatron_pp_ext.features.pairs.order import request_in_pairs

        return request_in_pairs(request)

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.pairs.rules import RULES

        return RULES

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        if not request.options:
            return before(request)
        from megatron_pp_ext.features.pairs.order import Pairs

        if request.option(Pairs) is None:
            return before(request)
        from megatron_pp_ext.features.pairs.order import paired

        return paired(request, before)

    def counted(self, request: Request, costs: Costs) -> Costs:
        from megatron_pp_ext.features.pairs.order import counted

        return counted(request, costs)

    def compiled(
        self, timeline: Timeline, origin: str, cuts: Sequence[Cut]
    ) -> Iterable[tuple[Timeline, str]]:
        from megatron_pp_ext.features.pairs.order import compiled

        return compiled(timeline, origin, cuts)

    def extension(self, order: RankOrder) -> PairsOfRank | None:
        if all(len(step) == 1 for step in order.steps):
            return None
        from megatron_pp_ext.features.pairs.runtime import PairsOfRank

        return PairsOfRank()

    def hooked(self) -> tuple[ModuleType, ...]:
        from megatron_pp_ext.features.pairs import megatron

        return (megatron,)

    def config_checks(self, checks: Checks) -> Checks:
        def check(config: Any) -> None:
            if not getattr(config, "overlap_moe_expert_parallel_comm", False):
                return checks(config)
            from megatron_pp_ext.features.pairs.megatron import check_as_planned

            return check_as_planned(checks)(config)

        return check

    def step_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        if pipeline.request.options:
            from megatron_pp_ext.features.pairs.megatron import planned

            yield planned
