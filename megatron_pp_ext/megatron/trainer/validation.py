"""The hooks of this package's flags: Megatron's parser, and its validation, where the schedule is read.

Everything that can be known to be wrong is refused here, before any process group exists, with the value, the
rule and the fix in one line.
"""

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NoReturn

from megatron.core.utils import get_te_version

from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job import flag_table, layers, options, sizes
from megatron_pp_ext.job.layers import chunks_requested
from megatron_pp_ext.job.pipeline import read as request_of
from megatron_pp_ext.job.pipeline import require_files, stock_schedule
from megatron_pp_ext.job.requested_job import CORE, ENGINE, RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.megatron import requested, start_up
from megatron_pp_ext.megatron.core.optimizer import describe
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.releases import megatron_version
from megatron_pp_ext.megatron.requested import LastStep, Settings
from megatron_pp_ext.megatron.start_up import comparison, settings, show_compiling, summary
from megatron_pp_ext.megatron.trainer.agreement import refused
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.setting_error import failed_check


@hook("megatron.training.arguments:add_megatron_arguments", "parser", "the --pipeline-schedule flags")
def add_flags(stock: Callable[..., ArgumentParser], parser: ArgumentParser) -> ArgumentParser:
    """Add this package's flags to Megatron's."""
    parser = flag_table.add_flags(stock(parser))
    if type(parser) is ArgumentParser:
        # By default an error comes with the names of all of Megatron's flags, hundreds of lines.
        vars(parser)["error"] = functools.partial(_refuse, parser)
    return parser


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """End the process with argparse's ``message`` in one line, and the flag that may be meant."""
    unknown = next((word for word in message.split() if word.startswith("--")), "")
    flag = unknown.partition("=")[0].rstrip(":")
    option = [option for option in parser._option_string_actions if option.startswith("--")]
    fix = "correct it (--help shows all flags)"
    raise refused(f"{message}; {flag_table.hint(flag, option, fix) if flag and flag not in option else fix}")


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
        show_compiling()
        job, pipeline = read_flags(args)
        if pipeline is not None:
            requested.loaded().require(pipeline)
            if args.rank == 0 and pipeline.rehearsal is None:
                pipeline = replace(pipeline, summary=_summary(pipeline, job))
    except ValueError as error:
        raise refused(error) from error
    try:
        checks = args.check_for_nan_in_loss_and_grad
        with _one_of_each(args, pipeline):
            result = stock(args, defaults)
        if pipeline is not None and pipeline.rehearsal is not None:
            # Megatron drops it with its fake process group, but the planned job makes these checks.
            args.check_for_nan_in_loss_and_grad = checks
    except (AssertionError, ValueError) as error:
        raise refused(f"Megatron refuses these flags: {failed_check(error)}") from error
    # Megatron saves its flags in every checkpoint; see `checkpoint_loading`.
    args.pipeline_placement = describe(pipeline.placement) if pipeline and pipeline.source else None
    if pipeline is not None:
        for feature in FEATURES:
            feature.require_possible(pipeline.request)
        pipeline = replace(
            pipeline,
            predicting=layers.predicting_stage(job, pipeline.placement.stages),
            settings=settings(args, job, pipeline),
        )
    requested.activate(pipeline)
    return result


@contextmanager
def _one_of_each(args: Namespace, pipeline: requested.Pipeline | None) -> Iterator[None]:
    """Let Megatron's validation see as many ranks as one replica of each stage has.

    From the number of ranks it derives the data-parallel size, and from that the microbatches of a step.
    """
    ranks = args.world_size
    if pipeline is not None and pipeline.replicas:
        args.world_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    try:
        yield
    finally:
        args.world_size = ranks


@hook(
    "megatron.training.yaml_arguments:validate_yaml",
    "args defaults",
    "no schedule without its flags translated",
)
def refuse_yaml(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse a schedule with --yaml-cfg, under which Megatron ignores all other flags."""
    ours = [word for word in sys.argv if word.startswith(tuple(flag_table.flags()))]
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


def read_flags(args: Namespace) -> tuple[RequestedJob, requested.Pipeline | None]:
    """Return the job that ``args`` describe, and its pipeline, None if no flag of ours is set.

    ``args`` get what this package chose, and what Megatron needs to build the pipeline.  ValueError for what
    cannot be.
    """
    releases = {ENGINE: str(get_te_version()), CORE: megatron_version(), "zstandard": _zstandard()}
    job, layout = _chosen(RequestedJob.of_args(args, releases))
    profile, trace = job.flags.profile_pipeline, job.argument("pipeline_trace")
    require_files(profile, trace)
    pipeline = None
    if layout or job.pipeline.has_schedule or trace or profile:
        pipeline = _pipeline_of(job, layout)
    else:
        all_rules.refuse(replace(job, chunks=chunks_requested(job) or 1))
    vars(args).update(vars(job.args) | _needed(job, pipeline))
    return job, pipeline


def _chosen(job: RequestedJob) -> tuple[RequestedJob, str]:
    """Return ``job`` with a value for each ``auto``, and words about its layout; empty unless that was one.

    Where Megatron's own schedule is rehearsed, the job gets its name.
    """
    all_rules.refuse(job)
    layout = ""
    if job.pipeline.finds_layout:
        job, layout = requested.loaded().layout(job, _data_parallel_size(job), start_up.vocabulary(job))
    values = options.chosen(
        job, lambda other: request_of(other, _data_parallel_size(other)), lambda: start_up.vocabulary(job)
    )
    if not job.pipeline.has_schedule and job.flags.rehearse_pipeline is not None:
        values |= {"pipeline_schedule": stock_schedule(job)}
    return job.with_arguments(**values), layout


def _pipeline_of(job: RequestedJob, layout: str) -> requested.Pipeline:
    """Return the pipeline of ``job`` with its first schedule, and words about its layout.

    ValueError if it cannot be.
    """
    request, trace = request_of(job, _data_parallel_size(job)), job.argument("pipeline_trace")
    if request.is_stock or not job.pipeline.has_schedule:
        return requested.Pipeline(request, trace=trace, profile=job.flags.profile_pipeline, layout=layout)
    costs = start_up.costs_of(job)
    try:
        if job.pipeline.pipeline_costs is not None:
            costs.of(request.finest)  # the start line would take unit costs for a wrong file
        source = Source(request, costs)
    except OSError as error:
        raise ValueError(f"--pipeline-schedule {job.pipeline.pipeline_schedule}: {error}") from error
    rehearsal = job.flags.rehearse_pipeline
    return requested.Pipeline(
        request,
        source,
        Settings(
            estimate=start_up.estimate(job),
            seconds=None if job.pipeline.pipeline_costs is None else costs,
        ),
        trace=trace,
        rehearsal=rehearsal,
        layers=() if rehearsal is None else tuple(layers.by_stage(job, source.placement.stages)),
        layout=layout,
        last_step=LastStep(is_wanted=not job.argument("no_pipeline_log")),
    )


def _needed(job: RequestedJob, pipeline: requested.Pipeline | None) -> dict[str, Any]:
    """Return the arguments by which Megatron builds and runs the ``pipeline`` of ``job``.

    Among them are the chunks a rank, where the schedule has several and the user left their number open.
    """
    if pipeline is None or pipeline.source is None:
        return {}
    # Pairs put weight gradients off by themselves; layers that do so too would do it twice.
    values: dict[str, Any] = dict.fromkeys(["delay_wgrad_compute", *_turned_off(job, pipeline)], False)
    if pipeline.updates is not None:
        values["rerun_mode"] = "disabled"  # its checks make all ranks wait for each other in every step
    if pipeline.rehearsal is not None:
        # A rank without data learns from global rank 0, which is absent, that there is some to train on.
        values["do_train"] = True
    if layers.stages_described(job) is None:
        chunks = pipeline.placement.chunks
        if catalog.abilities(pipeline.name).is_compiled:
            values["num_layers_per_virtual_pipeline_stage"] = None
            values["num_virtual_stages_per_pipeline_rank"] = chunks if chunks > 1 else None
        elif chunks_requested(job) is None and chunks > 1:
            values["num_virtual_stages_per_pipeline_rank"] = chunks
    return values


def _turned_off(job: RequestedJob, pipeline: requested.Pipeline) -> dict[str, str]:
    return all_rules.turned_off(replace(job, placement=pipeline.placement))


def _summary(pipeline: requested.Pipeline, job: RequestedJob) -> str:
    lines = *_turned_off(job, pipeline).values(), *comparison(job, pipeline.request.data)
    return "\n".join((summary(pipeline, start_up.costs_of(job)), *lines))


def _data_parallel_size(job: RequestedJob) -> int:
    world_size = job.args.world_size
    if sizes.requested_replicas(job):
        return sizes.data_parallel_size(job, world_size)
    # Megatron itself refuses sizes that do not divide.
    return max(1, world_size // sizes.fewest_ranks(job))
