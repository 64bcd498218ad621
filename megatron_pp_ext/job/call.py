"""Requests by a call from Python, without flags: the same ``Request`` as from flags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.job import options, pipeline
from megatron_pp_ext.job.pipeline import require_plain
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file, csv_file
from megatron_pp_ext.schedule.placement import FIRST, LAST
from megatron_pp_ext.setting_error import SettingError


def request_of_call(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    limit: float | str | None = None,
    stages: int | None = None,
    loss_rank: str = LAST,
    **of_features: Any,
) -> Request:
    """Return the request of a loop that updates once a step; ValueError, in one line, if it cannot be.

    The arguments are those of ``megatron_pp_ext.install``, and the number of ``stages`` that costs are given
    for; ``of_features`` are the arguments of ``job.options.arguments``, None where they are not given.
    """
    if not isinstance(schedule, str):
        raise ValueError(f"schedule is {schedule!r}; give a name, such as 'v-half'")
    for name, value, least in (("ranks", ranks, 2), ("microbatches", microbatches, 1), ("chunks", chunks, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise SettingError(
                f"--pipeline-{name} is {value!r}, but must be a whole number from {least} on; give "
                f"--pipeline-{name}={least}"
            )
    can = catalog.abilities(schedule)
    if stages is not None and chunks is None and can.is_compiled:
        chunks = max(1, stages // ranks)
    if not can.flushes:
        raise ValueError(
            f"{schedule} never flushes: its stages update their weights within a step, each at its own time, "
            "and a loop on megatron.core updates all of them once a step; choose a schedule that flushes, "
            "such as 1f1b or v-half, or train with Megatron's own loop and --pipeline-schedule"
        )
    arguments = options.arguments()
    for name in of_features:
        if name not in arguments:
            raise TypeError(f"install() got an unexpected keyword argument {name!r}")
    values = [(arguments[name], value) for name, value in of_features.items() if value is not None]
    if can.file is not None:
        request = _from_file(schedule, can.file, ranks, microbatches, chunks, limit)
    else:
        is_of_feature = any(argument.has_limit(value) for argument, value in values)
        own_limit = None if limit is None or (is_of_feature and not can.takes_limit) else limit
        read = None if own_limit is None else pipeline.read_limit(own_limit, ranks, pipeline.BY_CALL)
        request = named(schedule, ranks, microbatches, chunks, read)
    for argument, value in values:
        request = argument.read(request, value, limit)
    all_rules.refuse_call(schedule, {argument.name: value for argument, value in values})
    request.require_few_actions()
    return with_loss_on(request, loss_rank)


def with_loss_on(request: Request, rank: str, option: str = "--pipeline-loss-rank") -> Request:
    """Return ``request`` with the loss of a V on the first or the last rank, by ``option``.

    ValueError for another word, and for the first rank where the schedule has no V.
    """
    if rank not in (FIRST, LAST):
        raise SettingError(f"{option} is {rank!r}; give {FIRST!r} or {LAST!r}, or leave it out")
    if rank == FIRST and not any(placement.folds for placement in request.placements):
        raise SettingError(
            f"{option} is {FIRST!r}, but {request.schedule} has the loss on the last rank; leave {option} "
            "out, or choose a V, such as v-half"
        )
    return request.with_loss_on(rank)


def _from_file(
    name: str, file: Path, ranks: int, microbatches: int, chunks: int | None, limit: float | str | None
) -> Request:
    if limit is not None:
        raise ValueError(f"a memory limit has no meaning for {name}: leave it out, or choose flex")
    try:
        schedule = csv_file.read(file)
    except OSError as error:
        raise ValueError(f"{name}: {error}; give the path of a schedule's file") from error
    placement = schedule.placement
    for name_of_size, value, size in (
        ("ranks", ranks, schedule.ranks),
        ("microbatches", microbatches, schedule.microbatches),
        ("chunks", placement.chunks if chunks is None else chunks, placement.chunks),
    ):
        if value != size:
            raise SettingError(
                f"{file} is a schedule for {size} {name_of_size}, got {value}; "
                f"give --pipeline-{name_of_size}={size}"
            )
    require_plain(schedule, file)
    return Request(name, (placement,), microbatches, schedule.splits_backward, from_file=schedule)


def read_costs(costs: str | Path | Costs | Sequence[float]) -> Costs:
    """Return the costs that a file has, that are given as they are, or that have one number for each stage.

    Such a number holds for each F, I and W of the stage.  ValueError, in one line, for anything else.
    """
    if isinstance(costs, Costs):
        return costs
    if isinstance(costs, (str, Path)):
        try:
            return costs_file.read(costs)
        except OSError as error:
            raise SettingError(f"--pipeline-costs: {error}; give the path of a file with costs") from error
    try:
        seconds = [float(number) for number in costs]
    except (TypeError, ValueError):
        raise ValueError(
            f"costs are {costs!r}; give the path of a file, Costs, or a number for each stage"
        ) from None
    return Costs(tuple(StageCosts(number, number, number) for number in seconds))
