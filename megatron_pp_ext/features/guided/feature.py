"""Profile-guided schedules: some steps are measured, and a shorter order is compiled from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp_ext.features.feature import Feature

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import Guide


class Guided(Feature):
    """``--pipeline-profile-steps``: what stages cost is measured while training goes on."""

    name = "guided"
    flags = Path(__file__).with_name("flags.toml")
    asks = ("pipeline_profile_steps",)

    def read(self, job: RequestedJob, request: Request) -> Request:
        steps = job.flags.pipeline_profile_steps
        if steps is None:
            return request
        from megatron_pp_ext.features.guided.order import profile_steps

        return request.with_option(profile_steps(steps, job.flags.train_iters))

    def rules(self) -> tuple[Rules, ...]:
        from megatron_pp_ext.features.guided.rules import RULES

        return RULES

    def guide(self, pipeline: Pipeline) -> Guide | None:
        if not pipeline.request.options:
            return None
        from megatron_pp_ext.features.guided.order import ProfileSteps

        steps = pipeline.request.option(ProfileSteps)
        if steps is None:
            return None
        from megatron_pp_ext.features.guided.megatron import ProfileGuide

        return ProfileGuide(pipeline, steps)
