"""What a run says at its start: the schedule with its prediction, and what follows the placement."""

import functools
from argparse import Namespace

from megatron_pp_ext import log_lines
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.job.vocabulary_source import CostsOf
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Shape
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
    ranks are idle.  Where the model cannot be estimated, every F, I and W counts as 1, which the line says.

    A layout that this package chose comes last.

    ValueError where the schedule cannot be built for the step's number of microbatches.
    """
    return "; ".join(filter(None, (_about_schedule(pipeline, costs_of), pipeline.layout)))


def _about_schedule(pipeline: Pipeline, costs_of: CostsOf) -> str:
    request, placement = pipeline.request, pipeline.placement
    assert request is not None
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
    until = ""
    if pipeline.profile_steps is not None:
        until = f", until steps {pipeline.profile_steps} are measured"
    elif catalog.abilities(name).measures_memory:
        until = " in the first step, then as much memory and as small a bubble as the devices allow"
    return (
        f"{shape}, m = {request.microbatches}, peak {peak} microbatch{'es' * (peak != '1')}, "
        f"predicted bubble {timeline.bubble:.1%}{at}{until}{_about_vocabulary(pipeline)}"
    )


def _about_vocabulary(pipeline: Pipeline) -> str:
    if pipeline.source is not None and pipeline.source.note:
        return f"; {pipeline.source.note}"
    return "; vocabulary shared by all ranks" if pipeline.placement.shares_vocabulary else ""


def _schedule(pipeline: Pipeline) -> Schedule:
    request = pipeline.request
    assert request is not None
    if pipeline.source is None:
        return catalog.build(request.schedule, request.ranks, request.microbatches, pipeline.placement.chunks)
    return pipeline.source.build(request.microbatches, None)


def _costs(pipeline: Pipeline, costs_of: CostsOf) -> tuple[Costs, str]:
    """Return the costs of the stages, and words that say so where they are not those of the model."""
    request = pipeline.request
    assert request is not None
    try:
        costs = costs_of(request.finest.stages, pipeline.placement.shares_vocabulary)
        return costs.merged(pipeline.placement.stages), ""
    except Exception:  # any model may train, also one that the estimate does not know
        return Costs.unit(pipeline.placement), " at unit costs"


def caveat(pipeline: Pipeline, args: Namespace) -> str:
    """Return what makes this run differ from one under 1F1B, as two seeds do; empty where nothing does.

    Megatron seeds initial weights and dropout by pipeline rank, so both follow the placement of the layers.
    ``args`` are those of a run whose checkpoint is loaded, if it has one.
    """
    if pipeline.source is None or pipeline.placement.shape is Shape.LINEAR:
        return ""
    is_loaded = args.iteration > 0 or (args.load and args.finetune)
    is_loaded = is_loaded or getattr(args, "pretrained_checkpoint", None)
    follow = []
    if not is_loaded and not args.pipeline_layer_seeds:
        follow.append("initial weights")
    if args.attention_dropout > 0 or args.hidden_dropout > 0:
        follow.append("dropout")
    if not follow:
        return ""
    fix = {
        "initial weights": "start from one checkpoint, or add --pipeline-layer-seeds to all runs",
        "dropout": "turn dropout off",
    }
    verb = "follow" if follow != ["dropout"] else "follows"
    said = (
        f"{' and '.join(follow).capitalize()} {verb} the placement of layers: this run differs from one "
        f"under 1F1B as two seeds do.\nTo make losses equal, {', and '.join(fix[one] for one in follow)}."
    )
    if "dropout" in follow and (measured_by := _measured_by(pipeline)):
        said += (
            f"\nUnder {measured_by} the order of a rank's chunks goes by measurements, and dropout by that "
            "order: losses change with the schedule, and two runs with one seed may differ."
        )
    return said


def _measured_by(pipeline: Pipeline) -> str | None:
    """Return the flag by which the schedule changes during the run; None where it stays as it is."""
    if pipeline.profile_steps is not None:
        return f"--pipeline-profile-steps {pipeline.profile_steps}"
    assert pipeline.source is not None
    name = pipeline.source.name
    return f"--pipeline-schedule {name}" if catalog.abilities(name).measures_memory else None
