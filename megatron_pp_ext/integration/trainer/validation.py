"""The hooks around Megatron's validation of its flags, where a schedule is read for all other hooks.

Everything that can be known to be wrong is refused here, before any process group exists, with the value,
the rule and the fix in one line.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from megatron.core.utils import get_te_version

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.integration import products, requested
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.settings import Settings, costs_at
from megatron_pp_ext.integration.start_up import comparison, show_compiling, summary
from megatron_pp_ext.integration.trainer import model_costs
from megatron_pp_ext.integration.trainer.agreement import refused
from megatron_pp_ext.integration.trainer.checkpoint_loading import describe
from megatron_pp_ext.integration.trainer.replica_samples import one_of_each
from megatron_pp_ext.integration.trainer.run_settings import settings
from megatron_pp_ext.integration.workarounds import dataset_helpers, needed_flags
from megatron_pp_ext.job import (
    layers,
    measurements,
    options,
    our_flags,
    pipeline,
    replicas,
    sizes,
    stage_costs,
)
from megatron_pp_ext.job.layers import chunks_requested
from megatron_pp_ext.job.requested_job import ENGINE, RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement


@hook(
    "megatron.training.arguments:validate_args",
    "args defaults",
    "a schedule in Megatron's own terms, before Megatron checks them",
)
def translate_flags(stock: Callable[..., Any], args: Namespace, defaults: Any = MappingProxyType({})) -> Any:
    """Express the schedule in Megatron's own flags, then let Megatron validate them.

    This is before any process group is made.  A refused command line ends the process with one line.
    """
    try:
        if getattr(args, needed_flags.OUR_SCRIPT, False):
            needed_flags.require_for_our_script(args)
        needed_flags.require_valid(args, defaults)
        show_compiling()
        read = read_flags(args)
        found = pipeline_of(*read) if read is not None else None
        if args.rank == 0 and not dataset_helpers.are_built():
            dataset_helpers.build()
        if found is not None:
            products.loaded().require(found)
            needed_flags.require_trainable(args)
            if args.rank == 0 and found.rehearsal is None:
                found = replace(found, summary=_summary(found, RequestedJob(args)))
    except ValueError as error:
        raise refused(error) from error
    try:
        checks = args.check_for_nan_in_loss_and_grad
        with one_of_each(args, found):
            result = stock(args, defaults)
        if found is not None and found.rehearsal is not None:
            # Megatron drops it with its fake process group, but the planned job makes these checks.
            args.check_for_nan_in_loss_and_grad = checks
    except (AssertionError, ValueError) as error:
        raise refused(needed_flags.failed_check(error)) from error
    # Megatron saves its flags in every checkpoint; see `checkpoint_loading`.
    args.pipeline_placement = describe(found.placement) if found and found.source else None
    if found is not None:
        for feature in FEATURES:
            feature.require_possible(found.request)
        found = replace(
            found,
            predicting=layers.predicting_stage(Job.of(args), found.placement.stages),
            settings=settings(args, found),
        )
    requested.activate(found)
    return result


@hook(
    "megatron.training.yaml_arguments:validate_yaml",
    "args defaults",
    "no schedule without its flags translated",
)
def refuse_yaml(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse a schedule with --yaml-cfg, under which Megatron ignores all other flags."""
    ours = [word for word in sys.argv if word.startswith(tuple(our_flags.flags()))]
    if ours:
        raise refused(
            f"{ours[0]} has no effect with --yaml-cfg, under which Megatron ignores other flags; give "
            "all settings as flags"
        )
    return stock(*args, **kwargs)


def _zstandard() -> str:
    """Return the installed version of what Megatron's files of logits are compressed by; 0 without one."""
    try:
        return version("zstandard")
    except PackageNotFoundError:
        return "0"


def read_flags(args: Namespace) -> tuple[RequestedJob, str] | None:
    """The job that ``args`` describe, and words about its layout; ValueError for what cannot be.

    None if ``args`` set no flag of ours.  They get the layout for which ``auto`` stood, and the name of
    Megatron's own schedule where that is rehearsed.  ``pipeline_of`` makes the schedule.
    """
    asked = RequestedJob(args, {ENGINE: str(get_te_version()), "zstandard": _zstandard()})
    all_rules.refuse(asked)
    layout = ""
    if asked.pipeline.finds_layout:
        data, rows = _data_parallel_size(asked), model_costs.vocabulary(asked)
        asked, layout = products.loaded().layout(asked, data, rows)
        args.pipeline_model_parallel_layout = asked.pipeline.pipeline_model_parallel_layout
        args.num_virtual_stages_per_pipeline_rank = None
    chosen = options.chosen(
        asked,
        lambda one: pipeline.read(one, _data_parallel_size(one)),
        lambda: model_costs.vocabulary(asked),
    )
    vars(args).update(chosen)
    measurements.require_files(args.profile_pipeline, args.pipeline_trace)
    if args.pipeline_schedule is None and args.rehearse_pipeline is not None:
        args.pipeline_schedule = pipeline.stock_schedule(asked.job)
    asked = replace(asked, args=args)  # which has all of it by now, and gets what follows from the schedule
    ours = args.pipeline_schedule, args.pipeline_trace, args.profile_pipeline
    if all(flag is None for flag in ours) and not layout:
        all_rules.refuse(replace(asked, chunks=chunks_requested(asked.job) or 1))
        return None
    return asked, layout


def pipeline_of(asked: RequestedJob, layout: str) -> requested.Pipeline:
    """The pipeline of what was ``asked``, with its first schedule; ValueError if it cannot be.

    Sets the arguments that follow: ``num_virtual_stages_per_pipeline_rank``, from which Megatron derives the
    rest, where the schedule needs chunks and the user left their number open.
    """
    args = asked.args
    request = pipeline.read(asked, _data_parallel_size(asked))
    if request.is_stock or not asked.pipeline.has_schedule:
        return requested.Pipeline(
            request, trace=args.pipeline_trace, profile=args.profile_pipeline, layout=layout
        )
    try:
        if asked.pipeline.pipeline_costs is not None:
            _costs(asked, request.finest.stages)  # the start line would take unit costs for a wrong file
        source = Source(request, functools.partial(_costs, asked))
    except OSError as error:
        raise ValueError(f"--pipeline-schedule {args.pipeline_schedule}: {error}") from error
    _settle_chunks(args, asked.job, request, source.placement)
    # Pairs put weight gradients off by themselves; layers that do so too would do it twice.
    args.delay_wgrad_compute = False
    if request.updates is not None:
        args.rerun_mode = "disabled"  # its checks make all ranks wait for each other in every step
    rehearsed: tuple[int, ...] = ()
    if args.rehearse_pipeline is not None:
        rehearsed = tuple(layers.by_stage(asked.job, source.placement.stages))
        # A rank without data learns from global rank 0, which is absent, that there is some to train on.
        args.do_train = True
    return requested.Pipeline(
        request,
        source,
        Settings(costs_at=costs_at(model_costs.estimate, asked)),
        trace=args.pipeline_trace,
        rehearsal=args.rehearse_pipeline,
        layers=rehearsed,
        layout=layout,
    )


def _summary(found: requested.Pipeline, asked: RequestedJob) -> str:
    lines = comparison(asked, found.request.data)
    return "\n".join((summary(found, functools.partial(_costs, asked)), *lines))


def _data_parallel_size(asked: RequestedJob) -> int:
    world_size = asked.args.world_size
    if replicas.requested(asked.job):
        return sizes.data_parallel_size(asked.job, world_size)
    # Megatron itself refuses sizes that do not divide.
    return max(1, world_size // sizes.fewest_ranks(asked.job))


def _costs(asked: RequestedJob, stages: int, splits_head: bool = False) -> Costs:
    if asked.pipeline.pipeline_costs is None:
        return model_costs.estimate(asked, stages, splits_head)
    return stage_costs.cut(stage_costs.read(asked.job), asked.job, stages, splits_head)


def _settle_chunks(args: Namespace, job: Job, request: Request, placement: Placement) -> None:
    """Let Megatron build as many chunks a rank as the schedule has."""
    if layers.stages_described(job) is not None:
        return
    if catalog.abilities(request.schedule).is_compiled:
        args.num_layers_per_virtual_pipeline_stage = None
        args.num_virtual_stages_per_pipeline_rank = placement.chunks if placement.chunks > 1 else None
    elif chunks_requested(job) is None and placement.chunks > 1:
        args.num_virtual_stages_per_pipeline_rank = placement.chunks
