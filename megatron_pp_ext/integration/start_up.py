"""What a run logs at its start: the schedule with its estimate."""

import functools

from megatron_pp_ext import log_lines
from megatron_pp_ext.compiler.make import CostsOf, make
from megatron_pp_ext.integration import products
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate


@functools.cache
def show_compiling() -> None:
    """Print what the compiler logs from now on; of the ranks of a machine one alone compiles a schedule."""
    log_lines.show_all("megatron_pp_ext.compiler", lambda line: _print_once(line))


@functools.cache
def _print_once(line: str) -> None:
    print(f"megatron_pp_ext: {line}", flush=True)


def summary(pipeline: Pipeline, costs_of: CostsOf) -> str:
    """Return the line about the schedule of ``pipeline``, for an ordinary training step.

    ``costs_of`` returns what the stages cost: those of --pipeline-costs, otherwise the estimate from
    the model's arithmetic, in which messages take no time.  The peak is that of the rank with the highest, in
    microbatches' activations of all stages of the rank; the bubble is the share of ranks x time in which
    ranks are idle.  Where the model cannot be estimated, every F, I and W counts as 1, which the line
    reports.

    The order of microbatches and a layout that this package chose come last.

    ValueError where the schedule cannot be built for the step's number of microbatches.
    """
    return "; ".join(
        filter(
            None,
            (
                _about_schedule(pipeline, costs_of),
                *(option.about for option in pipeline.request.options),
                pipeline.layout,
            ),
        )
    )


def comparison(asked: RequestedJob, data: int) -> list[str]:
    """Return lines about the step of what is ``asked``, on ``data`` data-parallel ranks, beside others.

    They are of a GPU, so that there are none for a job on CPUs, nor for a model that cannot be estimated.
    """
    if asked.argument("distributed_backend") == "gloo":
        return []
    try:
        return list(products.loaded().comparison(asked, data))
    except Exception:  # a job trains whatever is wrong with an estimate that it does not need
        return []


def _about_schedule(pipeline: Pipeline, costs_of: CostsOf) -> str:
    request, placement = pipeline.request, pipeline.placement
    name = pipeline.source.name if pipeline.source else f"Megatron's own {request.schedule}"
    chunks = "1 chunk" if placement.chunks == 1 else f"{placement.chunks} chunks"
    shape = f"{name}: {placement.ranks} ranks x {chunks}"
    if pipeline.updates is not None:
        every, replicas = pipeline.updates.interval, pipeline.updates.replicas
        if not replicas.is_straight:
            shape = f"{name}: {placement.stages} stages with {replicas} replicas"
        return (
            f"{shape}, an update every {every} microbatch{'es' * (every > 1)}, peak "
            f"{replicas.warm_up(0) + 1} microbatches, no flush and so no bubble between updates"
        )
    try:
        schedule = _schedule(pipeline)
    except ValueError:
        if pipeline.source is not None:
            raise
        return f"{shape}, m = {request.microbatches}"  # stock has orders that the catalogue does not build
    costs, at = _costs(pipeline, costs_of)
    timeline = simulate(schedule, costs)
    peak = f"{max(timeline.peak_microbatches):.3g}"
    until = "".join(f", {option.until}" for option in request.options if option.until)
    if not until and catalog.abilities(name).measures_memory:
        until = " in the first step, then as much memory and as small a bubble as the devices allow"
    return (
        f"{shape}, m = {request.microbatches}, peak {peak} microbatch{'es' * (peak != '1')}, "
        f"predicted bubble {timeline.bubble:.1%}{at}{until}{_note(pipeline)}"
    )


def _note(pipeline: Pipeline) -> str:
    return f"; {pipeline.source.note}" if pipeline.source is not None and pipeline.source.note else ""


def _schedule(pipeline: Pipeline) -> Schedule:
    request = pipeline.request
    if pipeline.source is None:
        return make(request).schedule
    return pipeline.source.ordinary


def _costs(pipeline: Pipeline, costs_of: CostsOf) -> tuple[Costs, str]:
    """Return the costs of the stages, and a note where they are not those of the model."""
    request = pipeline.request
    try:
        costs = costs_of(request.finest.stages, pipeline.placement.splits_head)
        return costs.merged(pipeline.placement.stages), ""
    except ValueError:  # any model may train, also one that the estimate does not know
        return Costs.unit(pipeline.placement), " at unit costs"
