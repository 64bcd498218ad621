"""All of this package in one training script that reads flags: training, the planner and PipeDream.

Training imports neither of the other two.  Here it learns what they add, which is imported in the first step
or flag that needs it.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megatron_pp_ext import integration

if TYPE_CHECKING:
    from megatron_pp_ext.integration.requested import Pipeline
    from megatron_pp_ext.integration.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.integration.runners.transport import ProcessGroups
    from megatron_pp_ext.integration.settings import Saving
    from megatron_pp_ext.job.requested_job import RequestedJob


def install(cpu: bool = False) -> None:
    """Put the schedules into Megatron, and with ``cpu`` what it needs to run without a GPU.

    End the process with a one-line message, and Megatron untouched, if a hook does not fit or the release is
    unknown.
    """
    integration.install(cpu)
    from megatron_pp_ext.integration import start_up
    from megatron_pp_ext.integration.step_runners import MEASURES, RUNNERS
    from megatron_pp_ext.integration.trainer import layout_finder

    RUNNERS.register("flush-free", when=lambda pipeline: pipeline.updates is not None, make=_flush_free)
    MEASURES.register("profile", when=lambda pipeline: pipeline.profile is not None, make=_profiling)
    layout_finder.register(_layout, _better_layout)
    start_up.register_comparison(beside_stock)


def _flush_free(pipeline: "Pipeline", transport: "ProcessGroups") -> "PipelineRunner":
    from megatron_pp_ext.pipedream import flush_free

    return flush_free.runner(pipeline, transport)


def _profiling(*step: Any) -> AbstractContextManager[None]:
    from megatron_pp_ext.pipedream.layer_profiler import profiling

    return profiling(*step)


def _layout(asked: "RequestedJob", data: int, vocabulary: int) -> tuple["RequestedJob", str]:
    from megatron_pp_ext.planner.layout import requested_layout

    return requested_layout.resolve(asked, data, vocabulary)


def beside_stock(asked: "RequestedJob", data: int) -> list[str]:
    """Return what the planner predicts for a job at its start; see ``comparison.at_start``."""
    from megatron_pp_ext.integration.trainer import model_costs
    from megatron_pp_ext.planner.step import comparison

    return comparison.at_start(asked, data, lambda: model_costs.vocabulary(asked))


def _better_layout(*about: Any) -> tuple[str, "Saving"] | None:
    from megatron_pp_ext.planner.layout.advice import advised

    return advised(*about)
