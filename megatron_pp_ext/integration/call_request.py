"""The arguments of a call of ``megatron_pp_ext.install``, read once."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, kept_by_1f1b, least_limits
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.files import require_writable
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.settings import Settings
from megatron_pp_ext.integration.start_up import summary
from megatron_pp_ext.job import call
from megatron_pp_ext.job.call_words import in_words_of_call
from megatron_pp_ext.job.pipeline import STOCK
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import LAST, Placement, Shape
from megatron_pp_ext.schedule.simulate import Timeline, simulate

GivenCosts = str | Path | Costs | Sequence[float]


@dataclass(frozen=True, slots=True)
class InForce:
    """The schedule that runs under ``install``.  As text it is the line that the first step prints."""

    name: str
    placement: Placement
    microbatches: int
    """The number in an ordinary step; other steps may have other numbers."""
    peak: float
    """The activations of the rank that keeps most, in microbatches of all stages of a rank."""
    bubble: float
    """The predicted idle part of a step, between 0 and 1."""
    line: str

    @property
    def chunks(self) -> int:
        """The chunks a rank, for virtual_pipeline_model_parallel_size where there are several."""
        return self.placement.chunks

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class InstallCall:
    """A call's request, with the contents of its files, so that two calls can be compared."""

    request: Request
    costs: Costs | None
    trace: Path | None
    timeout: timedelta | None
    is_unproved: bool = False
    """Whether it permits operation that was never tried on a GPU."""

    @in_words_of_call()
    def pipeline(self) -> tuple[requested.Pipeline, InForce]:
        """Return the pipeline that the call requests; ValueError, in one line, if it cannot be."""
        request, costs_of = self.request, partial(_costs, self.costs, self.request.ranks)
        try:
            source = Source(request, costs_of)
        except InfeasibleLimit as error:
            if self.costs is not None or not catalog.abilities(request.schedule).takes_limit:
                raise
            # The compiler advises an amount, and without costs a call can only give a fraction.
            raise ValueError(
                f"memory_limit is {request.limit}, which no schedule of {request.ranks} ranks can keep; give "
                f"at least {_least_fraction(request, costs_of(request.finest.stages, False)):.3f}"
            ) from error
        settings = Settings() if self.timeout is None else Settings(timeout=self.timeout)
        pipeline = requested.Pipeline(
            request,
            source,
            settings,
            trace=self.trace,
            is_per_model=True,
            costs=self.costs,
            is_unproved=self.is_unproved,
        )
        costs = costs_of(request.finest.stages, pipeline.placement.splits_head)
        timeline = simulate(source.ordinary, costs.merged(source.placement.stages))
        peak, bubble = max(timeline.peak_microbatches), timeline.bubble
        line = f"megatron_pp_ext: {summary(pipeline, costs_of)}"
        if self.costs and (comparison := ", ".join(_beside_stock(timeline, self.costs, request))):
            line += f"; by these costs {comparison}"
        in_force = InForce(source.name, source.placement, request.microbatches, peak, bubble, line)
        return replace(pipeline, summary=line), in_force


def asked(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    costs: GivenCosts | None = None,
    trace: str | Path | None = None,
    timeout: float | timedelta | None = None,
    loss_rank: str = LAST,
    unproved: bool = False,
    **of_features: Any,
) -> InstallCall:
    """Read the arguments of ``install``; ValueError, in one line, for arguments that are not valid.

    ``of_features`` are the arguments of ``job.options.arguments``.
    """
    file = None
    if trace is not None:
        if not isinstance(trace, (str, Path)):
            raise ValueError(f"trace is {trace!r}; give the path of a file")
        file = Path(trace)
        require_writable("trace", file)
    if not isinstance(unproved, bool):
        raise ValueError(f"unproved is {unproved!r}; give True or False, or leave it out")
    explicit_costs = None if costs is None else call.read_costs(costs)
    if explicit_costs is None and isinstance(memory_limit, (int, float)) and memory_limit > LARGEST_FRACTION:
        raise ValueError(
            f"memory_limit is {memory_limit}, an amount in the unit of costs, and none are given; "
            "give costs, or a fraction of 1F1B's peak, such as 0.5"
        )
    stages = None if explicit_costs is None else len(explicit_costs.stages)
    sizes = ranks, microbatches, chunks
    request = call.request_of_call(schedule, *sizes, memory_limit, stages, loss_rank, **of_features)
    return InstallCall(
        request, explicit_costs, file, None if timeout is None else _patience(timeout), unproved
    )


def _beside_stock(timeline: Timeline, costs: Costs, request: Request) -> Iterator[str]:
    """Yield how a step, with the given ``costs`` of the finest stages, differs from one of stock's schedules.

    Stock's interleaved schedule is the one with as many chunks a rank as these stages make, where it has any.
    """
    if request.schedule in STOCK and not request.splits_head:
        return
    ranks, chunks = request.ranks, request.finest.chunks
    stock = {"1F1B": named("1f1b", ranks, request.microbatches)}
    if chunks > 1 and request.microbatches % ranks == 0:
        stock["interleaved"] = named("interleaved", ranks, request.microbatches, chunks)
    for name, other in stock.items():
        step = simulate(make(other).schedule, costs.merged(other.placement.stages))
        saved = 1 - timeline.makespan / step.makespan
        peak = max(timeline.peak_activations) / max(step.peak_activations)
        yield (
            f"{abs(saved):.1%} {'less' if saved > 0 else 'more'} time than stock {name} and "
            f"{peak:.2f} of its activations"
        )


def _least_fraction(request: Request, costs: Costs) -> float:
    """Return the least fraction of 1F1B's peak, rounded up, that some schedule keeps."""
    whole = kept_by_1f1b(request.ranks, request.microbatches, costs)
    least = min(max(least_limits(costs, placement)) for placement in request.placements)
    return math.ceil(1000 * least / whole) / 1000


def _costs(costs: Costs | None, ranks: int, stages: int, splits_head: bool) -> Costs:
    """Return ``costs`` for as many ``stages``, or unit costs where there are none."""
    if costs is None:
        loop = Placement(Shape.LOOP, ranks, stages // ranks, splits_head)
        return Costs.unit(loop)
    if len(costs.stages) != stages:
        raise ValueError(
            f"costs are given for {len(costs.stages)} stages, but there are {stages} (ranks x chunks); give "
            "one for each"
        )
    if splits_head and costs.head is None:
        raise ValueError(
            "the costs have none of a rank's part of the head; give them a head, or leave one of both out"
        )
    return costs


def _patience(timeout: float | timedelta) -> timedelta:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise ValueError(
            f"timeout is {timeout!r}, but must be a number or a timedelta; give minutes, such as 10"
        )
    with suppress(ValueError, OverflowError):
        patience = timeout if isinstance(timeout, timedelta) else timedelta(minutes=timeout)
        if patience > timedelta(0):
            return patience
    raise ValueError(f"timeout is {timeout}, but must be above 0; give minutes, such as 10")
