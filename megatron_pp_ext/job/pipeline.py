"""The pipeline that Megatron's flags request.  All front ends read it from here, and none decides it again.

Training, ``mpp estimate``, ``mpp search``, ``mpp schedule`` and ``mpp rehearse`` differ in where their flags
come from and in what the stages cost; what the flags mean is the same for all of them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, Limit
from megatron_pp_ext.compiler.request import COMPILED_CHUNKS, Request, named
from megatron_pp_ext.files import require_writable
from megatron_pp_ext.job import layers, options, sizes
from megatron_pp_ext.job.layers import chunks_requested, require_chunks
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.check import require_one_forward_order
from megatron_pp_ext.schedule.entry import NO_PIPELINE
from megatron_pp_ext.schedule.placement import linear, wave
from megatron_pp_ext.setting_error import SettingError


class Names(NamedTuple):
    """The name under which the number of ranks is given, and what an amount of memory is."""

    ranks: str
    amount: str


_FLAG = "--pipeline-memory-limit"

BY_FLAG = Names("--pipeline-model-parallel-size", "bytes, such as 40GB,")
BY_CALL = Names("--pipeline-ranks", "an amount in the unit of costs,")


def read_limit(value: float | str, ranks: int, names: Names = BY_FLAG) -> Limit:
    """Return ``value`` as a limit for ``ranks`` pipeline ranks; ValueError if it cannot be.

    ``compiler.limits.requested_budget`` states the meaning of the numbers.
    """
    size, amount = names
    limits = numbers(value, names)
    if len(limits) == 1:
        return limits[0]
    if len(limits) != ranks:
        raise SettingError(
            f"{_FLAG} {value} is for {len(limits)} ranks, but {size} is {ranks}; "
            f"give one number for all ranks, or {ranks}"
        )
    if min(limits) <= LARGEST_FRACTION < max(limits):
        raise SettingError(
            f"{_FLAG} {value} mixes fractions, which are up to {LARGEST_FRACTION:g}, and others; give each "
            f"rank a fraction, or each {amount}"
        )
    return limits


def numbers(value: float | str, names: Names = BY_FLAG) -> tuple[float, ...]:
    """Return the numbers in ``value``, one or several; ValueError unless all are above 0."""
    from megatron_pp_ext.amounts import number

    limits: tuple[float, ...] = ()
    readings = ([value], str(value).split("-"))  # 1e-3 is one number, too
    for parts in () if isinstance(value, bool) else readings:
        with suppress(TypeError, ValueError, OverflowError):
            limits = limits or tuple(map(number, parts))
    if not limits or not all(0 < number < math.inf for number in limits):
        raise SettingError(
            f"{_FLAG} is {value}, but must be a number above 0; give a fraction of 1F1B's peak, such "
            f"as 0.5, or {names.amount} for all ranks or, as in 0.9-0.8, for each"
        )
    return limits


def spelled(limit: Limit) -> str:
    """Return ``limit`` as the flag takes it."""
    limits = limit if isinstance(limit, tuple) else (limit,)
    return "-".join(f"{number:.0f}" if number == int(number) else repr(number) for number in limits)


def read_csv(path: Path, job: RequestedJob) -> Schedule:
    """Read a schedule that ``mpp schedule --csv``, a person or torch.distributed.pipelining wrote.

    Raises ValueError if the file is not a valid schedule for the ranks of ``job``, if these
    split the head, if its stages take the microbatches forward in different orders, or if the layers
    cannot follow its order (``require_first_first``, ``require_backwards_in_order``).
    """
    from megatron_pp_ext.schedule.formats import csv_file

    schedule, ranks = csv_file.read(path), job.parallel.pipeline_model_parallel_size
    if schedule.ranks != ranks:
        raise ValueError(
            f"{path} is a schedule for {schedule.ranks} ranks, got --pipeline-model-parallel-size {ranks}; "
            "set one to the other"
        )
    require_plain(schedule, path)
    require_trainable(schedule, job)
    return schedule


def require_plain(schedule: Schedule, path: Path) -> None:
    """Raise ValueError where the ranks of ``path`` split the head, or forwards have several orders."""
    if schedule.placement.splits_head:
        raise ValueError(
            f"the ranks of {path} split the head, which mpp simulates but training by a file cannot do; "
            "write the schedule with the head in the last stage, without S and T"
        )
    require_one_forward_order(schedule)


def require_trainable(schedule: Schedule, job: RequestedJob) -> None:
    """Raise ValueError if the layers of ``job`` cannot follow the order of ``schedule``."""
    if job.precision.transformer_impl == "transformer_engine":
        require_first_first(schedule)
    is_delayed = job.precision.fp8 is not None and job.precision.fp8_recipe == "delayed"
    if is_delayed and job.memory.recompute_granularity is not None:
        require_backwards_in_order(schedule)


def require_batches(job: Job, schedule: Schedule, data: int) -> None:
    """ValueError unless every step of ``job`` on ``data`` ranks has the microbatches of ``schedule``."""
    batch, name = job.batch, job.pipeline.pipeline_schedule
    samples = batch.micro_batch_size * data
    if any(size // samples != schedule.microbatches for size in batch.sizes):
        flag = "--step-batch-size-schedule"
        growing = batch.global_batch_size is None
        batches = f"{flag} {batch.step_batch_size_schedule}"
        raise ValueError(
            f"--pipeline-schedule {name} has {schedule.microbatches} microbatches in every "
            f"step, but {batches if growing else f'--global-batch-size {batch.global_batch_size}'} requests "
            f"others; {f'leave {flag} out and ' if growing else ''}set --global-batch-size "
            f"{schedule.microbatches * samples}"
        )


def require_backwards_in_order(schedule: Schedule) -> None:
    """Raise ValueError unless each stage takes the microbatches backward as it took them forward.

    Where a module of Transformer Engine is to be computed again, it puts the scales of delayed scaling into
    a queue of its own at each forward, and takes them out first in, first out (``FP8GlobalStateManager``).
    In another order a microbatch would be computed again with the scales of another.
    """
    orders: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for action in schedule:
        if action.kind in (Kind.F, Kind.I, Kind.B):
            orders[action.stage, action.kind is Kind.F].append(action.microbatch)
    for stage in range(schedule.placement.stages):
        forward, backward = orders[stage, True], orders[stage, False]
        for first, second in zip(forward, backward, strict=True):
            if first != second:
                raise ValueError(
                    f"schedule {schedule.name!r}: stage {stage} takes microbatch {second} backward where "
                    f"{first} is the next that it took forward, but with --fp8-recipe delayed Transformer "
                    "Engine computes microbatches again in that order; give the backwards the order of the "
                    "forwards, choose another --fp8-recipe, or recompute nothing"
                )


def require_first_first(schedule: Schedule) -> None:
    """Raise ValueError unless each stage begins with microbatch 0, its forwards and its weight gradients.

    Under Transformer Engine ``is_first_microbatch`` is true of a module's first forward ever and, where
    layers quantize (FP8, FP4, --te-precision-config-file), of microbatch 0's in every step.  That forward
    casts the weights, which later ones rely on; and where accumulation is fused its weight gradient
    overwrites ``main_grad``, to which other gradients are added (``accumulate`` in Transformer Engine's
    module/linear.py, layernorm_linear.py and grouped_linear.py, the same from 2.3 to 2.18; Megatron's
    extensions/transformer_engine.py).
    """
    for rank, order in enumerate(schedule.orders):
        started: set[tuple[int, bool]] = set()
        for action in order:
            is_forward = action.kind is Kind.F
            if action.kind is Kind.I or (action.stage, is_forward) in started:
                continue
            started.add((action.stage, is_forward))
            if action.microbatch != 0:
                raise ValueError(
                    f"schedule {schedule.name!r}: rank {rank} runs {action} before microbatch 0's "
                    f"{'forward' if is_forward else 'weight gradient'}, but Transformer Engine "
                    f"{'casts weights' if is_forward else 'overwrites earlier gradients'} in the latter; put "
                    "microbatch 0 first, or add --transformer-impl local"
                )


def require_files(profile: Path | None, trace: Path | None) -> None:
    """Raise ValueError for a profile or a trace that cannot be written."""
    if profile is not None and not profile.absolute().parent.is_dir():
        raise ValueError(f"--profile-pipeline {profile}: no such folder; make it first")
    for flag, path in (("--profile-pipeline", profile), ("--pipeline-trace", trace)):
        if path is not None:
            require_writable(flag, path)


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
    suited = tuple(placement for placement in request.placements if layers.can_predict(job, placement))
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
    request = replace(request, updates=sizes.read(job, microbatches))
    replicated = sizes.requested_replicas(job)
    if replicated:
        sizes.require_turns(job, replicated, microbatches)
    return request


def permitted(job: RequestedJob, names: Sequence[str]) -> list[str]:
    """Return the schedules of ``names`` that the rest of ``job`` does not rule out.

    ValueError, with the reason that rules out the first, where none is left.
    """
    allowed, reason = [], ""
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
            allowed.append(name)
        except ValueError as error:
            reason = reason or str(error)
    if not allowed:
        raise ValueError(reason)
    return allowed


def permitted_as_stock(job: RequestedJob, names: Sequence[str]) -> list[str]:
    """Return the schedules of ``names`` that Megatron runs without --pipeline-schedule, if it may."""
    allowed = []
    for name, chunks in STOCK.items():
        chosen = job.with_arguments(
            pipeline_schedule=None,
            pipeline_model_parallel_size=2,
            num_virtual_stages_per_pipeline_rank=chunks,
            expert_model_parallel_size=2,
        )
        if name in names and is_permitted(replace(chosen, chunks=chunks or 1)):
            allowed.append(name)
    return allowed


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
    ranks, text = job.parallel.pipeline_model_parallel_size, job.pipeline.pipeline_memory_limit
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
    limit = None if text is None or not can.takes_limit else read_limit(text, ranks)
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
