"""The pipeline that Megatron's flags request.  All front ends read it here, and none decides it again.

Training, ``mpp estimate``, ``mpp search``, ``mpp schedule`` and ``mpp rehearse`` differ in where their flags
come from and in what the stages cost; what the flags mean is the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.request import COMPILED_CHUNKS, Request, named
from megatron_pp_ext.job import layers, memory_limit, options, replicas, sizes, updates
from megatron_pp_ext.job.csv_schedule import read_csv, require_batches
from megatron_pp_ext.job.layers import chunks_requested, require_chunks
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import NO_PIPELINE
from megatron_pp_ext.schedule.placement import linear, wave


def for_world(job: RequestedJob, world_size: int) -> Request:
    """Return the request of ``job`` on ``world_size`` ranks; ValueError, in one line, if it cannot be."""
    all_rules.refuse(job)
    return read(job, sizes.data_parallel_size(job, world_size))


def read(job: RequestedJob, data: int) -> Request:
    """Return the request of ``job`` on ``data`` data-parallel ranks.

    ValueError, in one line, if it cannot be.  What the flags alone rule out has to be refused before.
    """
    microbatches, chunks = sizes.microbatches(job, data), chunks_requested(job)
    if job.pipeline.pipeline_schedule is None:
        ranks = job.parallel.pipeline_model_parallel_size
        if ranks == 1:
            alone = Request(NO_PIPELINE, (linear(1),), microbatches, splits_backward=False, data=data)
            return options.read(job, alone)
        stock = named(stock_schedule(job), ranks, microbatches, None if chunks == 1 else chunks)
        chunks = stock.placement.chunks
        all_rules.refuse(replace(job, chunks=chunks))
        return options.read(job, replace(stock, data=data, is_stock=True))
    request = _read_schedule(job, chunks, microbatches)
    if (loss := job.pipeline.pipeline_loss_rank) is not None:
        request = request.with_loss_on(loss)
    # flex chooses among the placements that have a place for MTP, if any has.
    suited = tuple(one for one in request.placements if layers.can_predict(job, one))
    request = options.read(job, replace(request, placements=suited or request.placements))
    all_rules.refuse(
        replace(
            job,
            placement=request.placements[0],
            chunks=request.finest.chunks,
            splits=request.may_split_backward,
            from_file=request.from_file,
        )
    )
    if request.from_file is not None:
        require_batches(job, request.from_file, data)
    request = replace(request, data=data, layers=_layers(job, request))
    if catalog.abilities(request.schedule).flushes:
        return request
    request = replace(request, updates=updates.read(job, microbatches))
    replicated = replicas.requested(job)
    if replicated:
        replicas.require_turns(job, replicated, microbatches)
    return request


def permitted(job: RequestedJob, names: Sequence[str]) -> list[str]:
    """Return those of the schedules ``names`` that the rest of ``job`` does not rule out.

    ValueError, with the reason that rules out the first, where none is left.
    """
    found, reason = [], ""
    for name in names:
        limit = 1.0 if catalog.abilities(name).takes_limit else None
        request = named(name, 2, 1, limit=limit)
        chosen = job.with_arguments(  # what a search chooses itself
            pipeline_schedule=name,
            pipeline_model_parallel_size=request.ranks,
            expert_model_parallel_size=2,
            pipeline_memory_limit=limit,
            pipeline_costs=None,
        )
        placement, chunks = request.placements[0], request.finest.chunks
        try:
            all_rules.refuse(
                replace(chosen, placement=placement, chunks=chunks, splits=request.splits_backward)
            )
            found.append(name)
        except ValueError as error:
            reason = reason or str(error)
    if not found:
        raise ValueError(reason)
    return found


def permitted_as_stock(job: RequestedJob, names: Sequence[str]) -> list[str]:
    """Return those of the schedules ``names`` that Megatron runs without --pipeline-schedule, if it may."""
    found = []
    for name, chunks in STOCK.items():
        chosen = job.with_arguments(
            pipeline_schedule=None,
            pipeline_model_parallel_size=2,
            num_virtual_stages_per_pipeline_rank=chunks,
            expert_model_parallel_size=2,
        )
        if name in names and is_permitted(replace(chosen, chunks=chunks or 1)):
            found.append(name)
    return found


def is_permitted(job: RequestedJob) -> bool:
    """Whether the flags of ``job`` break no rule, Megatron's own at its start included."""
    try:
        all_rules.refuse(job)
        all_rules.refuse_to_plan(job)
    except ValueError:
        return False
    return True


STOCK = {"1f1b": None, "interleaved": 2}
"""The schedules that Megatron runs itself, each with the fewest chunks a rank for which a flag asks."""


def stock_schedule(job: Job) -> str:
    """The name of the schedule that Megatron runs without --pipeline-schedule."""
    return "1f1b" if chunks_requested(job) in (None, 1) else "interleaved"


def _read_schedule(job: RequestedJob, chunks: int | None, microbatches: int) -> Request:
    """The schedule and its placements, without what other flags add."""
    name, ranks = job.pipeline.pipeline_schedule, job.parallel.pipeline_model_parallel_size
    assert name is not None
    can = catalog.abilities(name)
    if can.is_compiled:
        return _read_compiled(job, name, chunks, microbatches)
    if can.file is not None:
        try:
            schedule = read_csv(can.file, job)
        except OSError as error:
            raise ValueError(f"--pipeline-schedule {name}: {error}") from error
        placement = schedule.placement
        require_chunks(job, name, chunks, placement.chunks, chunks in (None, placement.chunks), "")
        return Request(name, (placement,), microbatches, schedule.splits_backward, from_file=schedule)
    if not can.flushes:
        require_chunks(job, name, chunks, 1, chunks in (None, 1), "")
        return named(name, ranks, microbatches)
    try:
        entry = catalog.entry(name)
    except ValueError as error:
        raise ValueError(f"--pipeline-schedule: {error}") from error
    more = " or more" if entry.accepts(entry.chunks + 1) else ""
    require_chunks(job, entry.name, chunks, entry.chunks, chunks is None or entry.accepts(chunks), more)
    return named(entry.name, ranks, microbatches, chunks)


def _read_compiled(job: RequestedJob, name: str, chunks: int | None, microbatches: int) -> Request:
    """The request for ``flex`` or ``auto``: the compiler chooses among the cuts that the layers allow."""
    ranks, given = job.parallel.pipeline_model_parallel_size, job.pipeline.pipeline_memory_limit
    can, stages, has_own_numbers = (
        catalog.abilities(name),
        layers.stages_described(job),
        layers.given_ends(job),
    )
    if chunks is None:
        is_uncut = has_own_numbers or job.model.pattern or job.model.has_heterogeneous_layers
        chunks = COMPILED_CHUNKS if not is_uncut and layers.spread(job) % (2 * ranks) == 0 else 1
    if can.measures_memory:
        accepted = chunks <= COMPILED_CHUNKS or stages is not None
        require_chunks(job, name, chunks, COMPILED_CHUNKS, accepted, " or fewer")
    limit = None if given is None or not can.takes_limit else memory_limit.read(given, ranks)
    request = named(name, ranks, microbatches, chunks, limit)
    if can.measures_memory and chunks > COMPILED_CHUNKS and stages is not None:
        return replace(request, placements=(wave(ranks, chunks),))
    if can.takes_limit and (stages is not None or has_own_numbers):
        # These fix the number of stages, and a number of layers for one end has no meaning under a V.
        fixed = tuple(
            placement
            for placement in request.placements
            if placement.chunks == chunks and not (has_own_numbers and placement.turns_round)
        )
        request = replace(request, placements=fixed)
    return request


def _layers(job: Job, request: Request) -> tuple[int, ...] | None:
    """The numbers of layers by stage; ValueError where the model's layers do not fill the stages."""
    if not job.model.layers:
        return None
    stages = request.finest.stages
    try:
        return tuple(layers.by_stage(job, stages))
    except ValueError as error:
        raise ValueError(
            f"--pipeline-schedule {job.pipeline.pipeline_schedule} with --pipeline-model-parallel-size "
            f"{job.parallel.pipeline_model_parallel_size} has {stages} stages: {error}"
        ) from error
