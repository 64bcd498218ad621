"""The start of a run: settings from Megatron's arguments, costs of its stages, and the lines that it logs."""

import copy
import functools
from argparse import Namespace
from datetime import timedelta
from functools import partial
from pathlib import Path

from megatron_pp_ext.job import sizes
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.requested import PIPELINE, Pipeline, Settings
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement, Shape


@functools.cache
def show_compiling() -> None:
    """Print what the compiler logs from now on; of the ranks of a machine one alone compiles a schedule."""
    from megatron_pp_ext import log_lines

    log_lines.show_all("megatron_pp_ext.compiler", lambda line: _print_once(line))


@functools.cache
def _print_once(line: str) -> None:
    print(f"megatron_pp_ext: {line}", flush=True)


def summary(pipeline: Pipeline, model: CostModel) -> str:
    """Return the line about the schedule of ``pipeline``, for an ordinary training step.

    ``model`` has what the stages cost: those of --pipeline-costs, otherwise the estimate from
    the model's arithmetic, in which messages take no time.  The peak is that of the rank with the highest, in
    microbatches' activations of all stages of the rank; the bubble is the share of ranks x time in which
    ranks are idle.  Where the model is not known, as ``install`` without costs, or cannot be estimated, every
    F, I and W of a rank counts as 1, which the line reports.

    The order of microbatches and a layout that this package chose come last.

    ValueError where the schedule cannot be built for the step's number of microbatches.
    """
    return "; ".join(
        filter(
            None,
            (
                _about_schedule(pipeline, model),
                *(option.about for option in pipeline.request.options),
                pipeline.layout,
            ),
        )
    )


def comparison(job: RequestedJob, data: int) -> list[str]:
    """Return lines that compare the step of ``job``, on ``data`` data-parallel ranks, with others.

    They are of a GPU, so that there are none for a job on CPUs, nor for a model that cannot be estimated.
    """
    if job.argument("distributed_backend") == "gloo":
        return []
    try:
        return list(requested.loaded().comparison(job, data))
    except Exception:  # a job trains whatever is wrong with an estimate that it does not need
        return []


def _about_schedule(pipeline: Pipeline, model: CostModel) -> str:
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
    from megatron_pp_ext.schedule.simulate import simulate

    costs, at = _costs(pipeline, model, schedule)
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
        from megatron_pp_ext.compiler.make import make

        return make(request).schedule
    return pipeline.source.ordinary


def _costs(pipeline: Pipeline, model: CostModel, schedule: Schedule) -> tuple[Costs, str]:
    """Return the costs of the actions of ``schedule``, and a note where they are not those of the model."""
    try:
        costs = pipeline.costs_of(schedule, model)
        return costs, _AT_UNIT_COSTS * (costs == Costs.unit(pipeline.placement))
    except ValueError:  # any model may train, also one that the estimate does not know
        return Costs.unit(pipeline.placement), _AT_UNIT_COSTS


_AT_UNIT_COSTS = " at unit costs"
"""The note where the bubble is that of the papers' pictures, and not of the model's own layers."""


def caveat(pipeline: Pipeline, args: Namespace) -> str:
    """Return why this run differs from one under 1F1B, as two seeds do; empty where it does not.

    Megatron seeds initial weights and dropout by pipeline rank, so both follow the placement of the layers.
    ``args`` are the flags of a run whose checkpoint is loaded, if it has one.
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
    text = (
        f"{' and '.join(follow).capitalize()} {verb} the placement of layers: this run differs from one "
        "under 1F1B as two seeds do.\n"
        f"To make losses equal, {', and '.join(fix[effect] for effect in follow)}."
    )
    if "dropout" in follow and (measured_by := _measured_by(pipeline)):
        text += (
            f"\nUnder {measured_by} the order of a rank's chunks goes by measurements, and dropout by that "
            "order: losses change with the schedule, and two runs with one seed may differ."
        )
    return text


def _measured_by(pipeline: Pipeline) -> str | None:
    """Return the flag by which the schedule changes during the run; None where it stays as it is."""
    for option in pipeline.request.options:
        if option.measured_by:
            return option.measured_by
    assert pipeline.source is not None
    name = pipeline.source.name
    return f"--pipeline-schedule {name}" if catalog.abilities(name).measures_memory else None


def costs_of(job: RequestedJob) -> CostModel:
    """Return the costs of the stages of ``job``: those of --pipeline-costs, else the estimate.

    Schedules are compiled from costs.  Where --pipeline-costs gives none, they follow from the arithmetic of
    the layers (``costs.stages``).
    """
    if job.pipeline.pipeline_costs is None:
        return estimate(job)
    from megatron_pp_ext.job import stage_costs

    return CostModel(
        lambda placement: stage_costs.cut(stage_costs.read(job), job, placement.stages, placement.splits_head)
    )


def estimate(job: RequestedJob) -> CostModel:
    """Return the costs of the stages of ``job`` as Megatron cuts it; messages take no time.

    The model raises ValueError where the flags do not determine them, and for what the costs do not know.
    """

    def at(tokens: int, sequences: int) -> CostModel:
        return estimate(job.changed(seq_length=tokens, micro_batch_size=sequences))

    return CostModel(partial(_estimate, job), at)


def _estimate(job: RequestedJob, placement: Placement) -> Costs:
    all_rules.refuse_to_predict(job)
    if not (job.model.hidden_size and job.model.num_attention_heads):
        raise ValueError("cannot estimate a model whose sizes only a file gives: give --pipeline-costs")
    from megatron_pp_ext.costs.stages import stage_costs

    return stage_costs(job, placement, vocabulary(job))


def vocabulary(job: RequestedJob) -> int:
    """The rows of the embedding; ValueError where neither a flag nor the tokenizer gives them."""
    sizes.require_vocabulary(job)
    if size := job.model.padded_vocab_size or job.model.vocab_size:
        return size
    # Imported here, since calls of ``install`` come while megatron.core is imported.
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        return int(build_tokenizer(copy.copy(job.args)).vocab_size)
    except (AssertionError, ImportError, OSError) as error:  # a tokenizer's files or its library
        raise ValueError(
            f"cannot tell the size of the vocabulary: {error}; give --padded-vocab-size"
        ) from error


def _message_bytes(job: Job) -> float:
    from megatron_pp_ext.costs.stages import bytes_between_stages

    return bytes_between_stages(job)


def _seconds_by_rates(args: Namespace, job: RequestedJob, schedule: Schedule, device: str) -> float | None:
    return requested.loaded().pipeline_seconds(
        job.changed(padded_vocab_size=args.padded_vocab_size), args.data_parallel_size, schedule, device
    )


def settings(args: Namespace, job: RequestedJob, pipeline: Pipeline) -> Settings:
    """Return the settings of the run of ``job``, which ``args`` describe, with ``pipeline``.

    Megatron goes on changing ``args`` while it starts and trains, so values that change are read at use.
    """
    communicators = args.nccl_communicator_config_path
    return Settings(
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        communicators=None if communicators is None else Path(communicators),
        has_priority=PIPELINE in (args.high_priority_stream_groups or ()),
        clip_grad=args.clip_grad,
        train_steps=lambda: int(args.train_iters),
        steps_done=lambda counted: int(getattr(args, "curr_iteration", 0)),
        message_bytes=partial(_message_bytes, job),
        advice=lambda *measured: requested.loaded().better_layout(
            job.changed(padded_vocab_size=args.padded_vocab_size), args.data_parallel_size, *measured
        ),
        seconds_by_rates=partial(_seconds_by_rates, args, job),
        estimate=pipeline.settings.estimate,
        seconds=pipeline.settings.seconds,
        caveat=partial(caveat, pipeline, args),
    )
