"""``megatron_pp_ext.install``: schedules for any trainer on megatron.core, without flags.

The hooks of megatron.core are put in place by the first call.  What is installed applies to the models that
are built while it is: their chunks are placed by it, and their steps run by it whatever is installed later.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from megatron_pp_ext.compiler.limits import LARGEST_FRACTION, InfeasibleLimit, kept_by_1f1b, least_limits
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.features.units.options import LengthsOf
from megatron_pp_ext.files import require_writable
from megatron_pp_ext.job import call
from megatron_pp_ext.job.model_config import in_words_of_call, use_variables
from megatron_pp_ext.job.pipeline import STOCK
from megatron_pp_ext.megatron import patching, requested
from megatron_pp_ext.megatron.requested import LastStep, Settings
from megatron_pp_ext.megatron.start_up import summary
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import LAST, Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.setting_error import SettingError

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
    _last_step: LastStep = field(default_factory=LastStep, repr=False, compare=False)

    def metrics(self) -> dict[str, float]:
        """Return the measured numbers of the last training step by name, for the trainer's log.

        Collective over the pipeline, and the host waits for the device: call it on all ranks after the same
        step, such as every tenth.  All ranks get the same numbers: ``pipeline/bubble``, the idle part of
        ranks x time; ``pipeline/peak-activations-bytes`` of the rank with the highest, with
        ``pipeline/peak-vs-plan``; and ``pipeline/step-vs-plan`` where the call has ``costs`` in seconds.

        Steps are timed from the first call on, which returns no numbers; later ones return none while a CUDA
        graph replays whole steps.
        """
        self._last_step.is_wanted = True
        return self._last_step.numbers()

    def without_log(self) -> Self:
        """Leave these numbers out of the logs of Megatron-Bridge, ms-swift and verl, and return this."""
        self._last_step.is_logged = False
        return self

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
        request, model = self.request, CostModel(partial(_costs, self.costs))
        try:
            source = Source(request, model)
        except InfeasibleLimit as error:
            if self.costs is not None or not catalog.abilities(request.schedule).takes_limit:
                raise
            # The compiler advises an amount, and without costs a call can only give a fraction.
            least = _least_fraction(request, model.of(replace(request.finest, splits_head=False)))
            raise SettingError(
                f"--pipeline-memory-limit is {request.limit}, which no schedule of {request.ranks} ranks "
                f"can keep; give at least {least:.3f}"
            ) from error
        settings = Settings(seconds=None if self.costs is None else model)
        if self.timeout is not None:
            settings = replace(settings, timeout=self.timeout)
        pipeline = requested.Pipeline(
            request,
            source,
            settings,
            trace=self.trace,
            is_per_model=True,
            costs=self.costs,
            is_unproved=self.is_unproved,
        )
        merged = model.merged_from(request.finest)
        costs = merged.of(source.placement)
        if source.ordinary.units:
            from megatron_pp_ext.features.units.sliced_orders import costs_in_units

            costs = costs_in_units(request, merged, source.ordinary)
        timeline = simulate(source.ordinary, costs)
        peak, bubble = max(timeline.peak_microbatches), timeline.bubble
        line = f"megatron_pp_ext: {summary(pipeline, model)}"
        if self.costs and (beside := ", ".join(_beside_stock(timeline, self.costs, request))):
            line += f"; by these costs {beside}"
        in_force = InForce(
            source.name, source.placement, request.microbatches, peak, bubble, line, pipeline.last_step
        )
        return replace(pipeline, summary=line), in_force


@in_words_of_call()
def read(
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
        raise SettingError(
            f"--pipeline-memory-limit is {memory_limit}, an amount in the unit of costs, and none are given; "
            "give --pipeline-costs, or a fraction of 1F1B's peak, such as 0.5"
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


def _costs(costs: Costs | None, placement: Placement) -> Costs:
    """Return ``costs`` for the stages of ``placement``, or unit costs where there are none."""
    if costs is None:
        return Costs.unit(placement)
    if len(costs.stages) != placement.stages:
        raise ValueError(
            f"costs are given for {len(costs.stages)} stages, but there are {placement.stages} (ranks x "
            "chunks); give one for each"
        )
    if placement.splits_head and costs.head is None:
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
    raise SettingError(f"--pipeline-timeout is {timeout}, but must be above 0; give minutes, such as 10")


_installed: tuple[InstallCall, requested.Pipeline, InForce] | None = None
"""What ``install`` has put in force."""

_kept: int | None = None
"""The names that were replaced already when the hooks were put in place; None while they are not."""


def install(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    costs: GivenCosts | None = None,
    vocabulary: str | None = None,
    trace: str | Path | None = None,
    timeout: float | timedelta | None = None,
    offload: float | str | None = None,
    slice_tokens: int | str | None = None,
    slice_check: str | None = None,
    loss_rank: str = LAST,
    order: str | None = None,
    lengths: LengthsOf | None = None,
    unproved: bool = False,
) -> InForce:
    """Run models of megatron.core that are built from now on by ``schedule``, and return a summary of it.

    Call it on every rank with the same arguments, before the model is built and best before its process
    groups are made.  ``schedule`` is a name of ``mpp list``, ``csv:FILE``, ``flex`` or ``auto``; those that
    never flush need Megatron's own loop.  ``ranks`` is the pipeline-parallel size, ``microbatches`` are those
    of an ordinary step: any step may have others.  ``chunks`` is the number of stages a rank, where the
    schedule leaves it open; the model's config has to have it as virtual_pipeline_model_parallel_size.
    ``memory_limit`` is that of ``flex``: a fraction of 1F1B's peak, or an amount in the unit of ``costs``.
    ``costs`` is a file, ``Costs``, or a number for each stage, which each F, I and W takes; without any,
    those of ``flex`` and ``auto`` follow from the model before its first step.  ``vocabulary`` is "shared" or
    "auto". ``trace`` is a file for the times of each step's actions.  ``timeout`` is how long a message may
    take, a timedelta or minutes (10).  ``offload`` lets activations wait on the host: a share of them, or
    "auto" for as many as cost no time, and for as few as keep ``memory_limit`` where there is one.
    ``slice_tokens`` cuts sequences into slices of so many tokens, which go through the pipeline one by one;
    "auto" chooses the number before the first step.  Before that the model is checked for operations along
    the sequence that slices do not know; ``slice_check="off"`` leaves that out.
    ``loss_rank`` is the pipeline rank with both ends of the model where a schedule has them on one, as a V
    does: "last", where other trainers look for the loss, or "first", as in the papers.

    ``order`` is "rule" or "search" for training steps whose microbatches have documents of unlike length:
    they are read ahead and run in an order planned by their lengths, and losses come back in the order of the
    data.  docs/lengths.md has the requirements for a loop.  Without it, as with "given", microbatches run in
    the order of the data, and nothing is read ahead or looked into; where their shapes vary, a line reports
    the gain of "rule".  ``lengths`` is a function from a batch of the data iterator to the lengths of its
    documents in tokens, for data that does not state them as Megatron's does.

    ``unproved`` permits what is built and was never run on a GPU: CUDA graphs under a schedule (docs/gpu.md).

    The same call again, with the same contents of its files, does nothing.  Another one replaces the
    schedule, unless a model was built for it.

    ValueError, in one line, for what cannot be.
    """
    global _installed
    call = read(
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        memory_limit=memory_limit,
        costs=costs,
        vocabulary=vocabulary,
        trace=trace,
        timeout=timeout,
        offload=offload,
        slice_tokens=slice_tokens,
        slice_check=slice_check,
        loss_rank=loss_rank,
        order=order,
        lengths=lengths,
        unproved=unproved,
    )
    if _installed is not None and call == _installed[0]:
        return _installed[2]
    pipeline, in_force = call.pipeline()
    _patch()
    if _installed is not None:
        _require_unused(_installed[1])
    requested.activate(pipeline)
    _installed = call, pipeline, in_force
    return in_force


def install_by_variables(variables: Mapping[str, str], log: bool = True, **arguments: Any) -> None:
    """Call ``install`` for the environment: errors name its ``variables``, which are by argument.

    Without ``log`` the trainer's log has no numbers of the pipeline.
    """
    use_variables(variables)
    in_force = install(**arguments)
    if not log:
        in_force.without_log()


@contextmanager
def installed(schedule: str, **about: Any) -> Iterator[InForce]:
    """Run the models that are built within the context by ``schedule``, and yield a summary of it.

    The arguments are those of ``install``.  Models that are built outside of it run by what is installed
    there, or by Megatron's own schedule.  Steps run by the schedule that their model was built for, in the
    context or outside of it.
    """
    pipeline, in_force = read(schedule, **about).pipeline()
    _patch()
    with requested.using(pipeline):
        yield in_force


def uninstall() -> None:
    """Undo ``install``: put back all that was replaced in Megatron, and in modules that imported it by name.

    ValueError, in one line, while a model is left whose layers are not where stock's schedule expects them.
    """
    global _installed, _kept
    if _kept is None:
        return
    from megatron_pp_ext.megatron.core import chunk_pipelines

    gc.collect()  # a model that is gone may be part of circles
    chunk_pipelines.forget()
    if _installed is not None:
        requested.activate(None)
    _installed = None
    patching.undo(_kept)
    _kept = None


def _patch() -> None:
    """Put the hooks of megatron.core in place, once; ValueError, in one line, where they do not fit."""
    global _kept
    flags = requested.pipeline()
    if flags is not None and not flags.is_per_model:
        raise ValueError(
            f"--pipeline-schedule {flags.name} is in force already; leave out the flag, or the call for "
            "another schedule"
        )
    if _kept is not None:
        return
    try:
        # This comes first: a Megatron that is too old or too new may not have what the hooks import.
        patching.require_known_release()
        from megatron_pp_ext.megatron import core_hooks

        _kept = patching.applied()
        patching.apply(core_hooks.INSTALLED)
    except patching.HookError as error:
        _kept = None
        raise ValueError(f"megatron_pp_ext: {error}") from error


def _require_unused(pipeline: requested.Pipeline) -> None:
    from megatron_pp_ext.megatron.core import chunk_pipelines

    gc.collect()
    chunks = chunk_pipelines.built_for(pipeline)
    if chunks:
        raise ValueError(
            f"{pipeline.name} is installed, and a model with {chunks} chunks on this rank was built for it; "
            "call megatron_pp_ext.install before the model is built, or delete the model first"
        )
