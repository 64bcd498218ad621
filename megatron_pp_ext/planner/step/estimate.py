"""Estimates of a training step, of its time and of its memory, with a flush and without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs.optimizers import ModelState
from megatron_pp_ext.costs.stages import cost_model, stage_costs
from megatron_pp_ext.costs.system import System, of_device
from megatron_pp_ext.job import sizes
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.pipedream.pace import seconds_of_an_update
from megatron_pp_ext.planner.step.error_band import Band, band
from megatron_pp_ext.planner.step.model_description import model_operations
from megatron_pp_ext.planner.step.programs import InFlight, Prepared
from megatron_pp_ext.planner.step.workload import Workload, additions
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Schedule, together
from megatron_pp_ext.schedule.costs import CostModel
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates
from megatron_pp_ext.schedule.launch_order import walk_over
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import most_buffers
from megatron_pp_ext.schedule.slots import Slots
from megatron_pp_ext.schedule.timing import RankSpan


class Kept(NamedTuple):
    """The memory of a replica of ``stage``: activations, message buffers, old versions of weights; bytes."""

    stage: int
    activations: float
    messages: int
    versions: int


@dataclass(frozen=True)
class Unflushed:
    """The stages of ``work`` with ``updates`` between their microbatches.

    A step ends with an update, ``Updates.interval`` microbatches after the one before.  With
    --pipeline-replicas a rank of the workload stands for all replicas of its stage, which cost the same;
    these ranks are the replicas one by one, by stage, as training numbers them.
    """

    work: Workload
    updates: Updates

    def kept(self) -> Iterator[Kept]:
        """Yield the memory of every rank once the pipeline is full."""
        replicas, (in_flight, buffers) = self.updates.replicas, _full(self.updates.replicas)
        for rank, messages in enumerate(buffers):
            stage = replicas.stage_of(rank)
            activations = in_flight.peak(rank, [self.work.parts[stage]])
            yield Kept(stage, activations, messages, self.updates.copies(stage))

    @cached_property
    def updating(self) -> list[float]:
        """The seconds in which each stage reduces its gradients and updates its weights, unless hidden.

        If one weight is on two stages, all wait for each other, and for the sum of its gradients.
        """
        waits = map(self.work.exposed, range(self.updates.replicas.stages))
        tied = self.work.tied_seconds
        return [wait.reduction + wait.update + wait.gathering + tied for wait in waits]

    @cached_property
    def working(self) -> list[float]:
        """The seconds that a replica of each stage computes between two updates."""
        counts = self.updates.replicas.counts
        return [
            self.updates.interval // count * (stage.forward + stage.seconds(Kind.B))
            for count, stage in zip(counts, self.work.costs.stages, strict=True)
        ]

    @property
    def busiest(self) -> tuple[int, float]:
        """The stage whose replicas are busiest, with the seconds of a step if they never waited."""
        busy = [sum(pair) for pair in zip(self.working, self.updating, strict=True)]
        return busy.index(max(busy)), max(busy)

    def seconds(self, updating: Sequence[float]) -> float:
        """Return the seconds of a step in a long run whose stages update in ``updating`` seconds."""
        updates = self.updates
        return seconds_of_an_update(
            updates.replicas, updates.interval, self.work.costs, updating, updates.waits
        )


@lru_cache(maxsize=8)
def _full(replicas: Replicas) -> tuple[InFlight, tuple[int, ...]]:
    """Return the activations in flight on every rank, and its message buffers, in a full pipeline.

    It is as long as it takes every rank to have its most in flight, and to have sent as many messages as may
    be under way.
    """
    orders = pipedream.orders(replicas, (replicas.ranks + SENDS_AHEAD) * max(replicas.counts))
    walk = walk_over(replicas.placed(orders))
    return InFlight(walk.program), most_buffers(walk)


MARGIN = 0.05
"""The memory that allocators leave unused and that is not modelled, as a fraction of the memory that comes
and goes in a step: activations, messages and the loss's workspace."""

_LONG_RUN = (
    "a microbatch every {:.4g} s, of which the busiest stage, {}, needs {:.4g} s; no published run without a "
    "flush was compared with this"
)
"""The note of an estimate without a flush."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank has at its fullest moment, by what they are for.

    Activations and messages have their peaks at moments of their own, and are counted as if at one.
    """

    weights: float
    gradients: float
    optimizer: float
    versions: float
    activations: float
    messages: float
    loss: float
    buffers: float
    margin: float
    reserved: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all components."""
        state = self.weights + self.gradients + self.optimizer + self.versions
        moving = self.activations + self.messages + self.loss + self.margin
        return state + moving + self.buffers + self.reserved

    def components(self) -> Iterator[tuple[str, float]]:
        """Yield every component with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """The estimate of a training step; ``ranks`` is the memory of every pipeline rank.

    ``pipeline_seconds`` last from the first action of any rank to the last end, ``other_seconds`` are those
    that ranks wait before and after it.  ``bubble`` is the idle fraction of the ranks' time in the pipeline;
    ``utilisation`` is of the machine's peak, for model operations, which leave recomputation out; None where
    only measurements of the stages are known.  ``band`` is how far published runs were from their
    estimates, or is None where costs of stages come from the file ``stages_from``.  ``note`` is what people
    should know of the schedule.  ``host_bytes`` are those of each rank's activations that are on its host,
    ``waiting_bytes`` the most of each rank's activations that wait for W at one time, and ``gather_bytes``
    those of its ``buffers`` in which W gathers what it reads.
    """

    step_seconds: float
    pipeline_seconds: float
    bubble: float
    utilisation: float | None
    tokens_per_second: float
    ranks: tuple[RankMemory, ...]
    band: Band | None
    note: str = ""
    stages_from: str | None = None
    host_bytes: tuple[float, ...] = ()
    waiting_bytes: tuple[float, ...] = ()
    gather_bytes: float = 0.0

    def __repr__(self) -> str:
        return f"<Estimate: {self.summary}>"

    @property
    def summary(self) -> str:
        """Its most important numbers, in a line."""
        return (
            f"step {self.step_seconds:.4g} s, MFU {self.mfu}, bubble {self.bubble:.1%}, "
            f"{self.fullest.total / 1e9:.1f} GB on the fullest rank"
        )

    @property
    def other_seconds(self) -> float:
        """The seconds that the step takes besides the pipeline."""
        return self.step_seconds - self.pipeline_seconds

    def require_possible(self, system: System) -> None:
        """Raise ValueError for a step that is shorter than the peak rates of the data sheet allow.

        Without a data sheet the peak is the fastest product that was measured, and others may be faster.
        """
        if system.peak_rates and (self.utilisation or 0) > 1:
            raise ValueError(
                f"a step of {self.step_seconds:.4g} s would be an MFU of {self.mfu}, which no machine has: "
                f"correct the rates of --system {system.name}, or the seconds of --pipeline-costs"
            )

    @property
    def mfu(self) -> str:
        """The utilisation in words."""
        return "unknown" if self.utilisation is None else f"{self.utilisation:.1%}"

    @property
    def grounds(self) -> str:
        """The accuracy of the seconds, in words."""
        if self.band is None:
            return f"every stage takes what {self.stages_from} says; all else is estimated"
        return str(self.band)

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


def rank_memory(
    work: Workload, rank: int, activations: float, messages: int, margin: float, older: int = 0
) -> RankMemory:
    """Return the memory of ``rank`` with these activations, ``messages`` and ``older`` weight versions."""
    return memory_beside(work, work.states[rank], work.loss_bytes(rank), activations, messages, margin, older)


def memory_beside(
    work: Workload,
    state: ModelState,
    loss: float,
    activations: float,
    messages: float,
    margin: float,
    older: int = 0,
    splits: bool = False,
) -> RankMemory:
    """Return the memory of a rank of ``work`` with this ``state`` and so many bytes for the loss.

    ``splits`` is whether backwards come in two halves.
    """
    buffers = messages * work.message + work.exchanged_bytes
    return RankMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        versions=older * state.weights,
        activations=activations,
        messages=buffers,
        loss=loss,
        buffers=work.model.buffers + splits * work.model.gather_buffers,
        margin=margin * (activations + buffers + loss),
        reserved=work.system.reserved_bytes,
    )


def _in_slots(work: Workload, order: Prepared, activations: Sequence[float]) -> Iterator[float]:
    """Yield what each rank keeps where layers are graphs by slot, from its ``activations`` without graphs.

    A slot's memory is taken for as long as there are graphs: the most that the captured modules keep in the
    rank's largest stage, and of each layer the output and the gradients of its input and output, which are
    shared where backwards are whole (``megatron/runners/cuda_graphs.py``).  All else comes and goes.
    """
    schedule = order.timer.schedule
    of_layer = 3 if schedule.splits_backward else 2
    eager = [part.without(captured) for part, (captured, _) in zip(work.parts, work.captured, strict=True)]
    peaks = zip(activations, order.in_flight.peaks(work.parts), order.in_flight.peaks(eager), strict=True)
    for rank, (kept, whole, without) in enumerate(peaks):
        stages = [work.captured[stage] for stage in work.placement.stages_of(rank)]
        count = Slots.of(together(schedule.orders[rank], schedule.paired)).count
        largest = max(part.most_kept(schedule.splits_backward) for part, _ in stages)
        tensors = of_layer * sum(layers for _, layers in stages) * work.model.hidden_bytes
        yield kept - whole + without + count * (largest + tensors)


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a step and of its pipeline, and the idle fraction of the ranks' time in the latter."""

    step_seconds: float
    pipeline_seconds: float
    bubble: float


@dataclass(frozen=True)
class StepModel:
    """The time and the memory of a step of ``work`` with ``microbatches``, under the schedule ``order``.

    ``name`` is what the schedule is called.  ``order`` may be that of fewer microbatches where memory alone
    is asked for.  ``margin`` is as ``MARGIN``.

    The step's pipeline is replayed action by action with the seconds of every stage.  The step also takes the
    time that ranks wait for gradients that are not reduced under later work, for the update, and for weights
    that are not gathered under the first forward.
    """

    work: Workload
    order: Prepared
    name: str
    microbatches: int
    margin: float = MARGIN

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory of every rank."""
        work, margin = self.work, self.margin
        if not catalog.abilities(self.name).flushes:
            return tuple(
                rank_memory(work, entry.stage, entry.activations, entry.messages, margin, entry.versions)
                for entry in self._unflushed.kept()
            )
        beside = work.head.activation if work.head else 0.0
        activations, schedule = self.order.in_flight.peaks(work.parts, beside), self.order.timer.schedule
        for addition in additions():
            activations = addition.activations(work, schedule, activations)
        if work.job.precision.cuda_graph_impl == "transformer_engine" and work.job.pipeline.pipeline_schedule:
            activations = tuple(_in_slots(work, self.order, activations))
        # Messages and logits are those of a unit.
        share = schedule.largest_share
        messages = [share * count for count in self.order.peak_messages]
        splits = schedule.splits_backward
        return tuple(
            memory_beside(work, work.states[rank], work.loss_bytes(rank, share), *peak, margin, splits=splits)
            for rank, peak in enumerate(zip(activations, messages, strict=True))
        )

    @cached_property
    def pace(self) -> Pace:
        """How long the step takes."""
        if not catalog.abilities(self.name).flushes:
            return _unflushed_pace(self._unflushed)
        costs = self.work.costs
        for addition in additions():
            costs = addition.in_step(self.work, self.order.timer.schedule, costs)
        spans = self.order.timer.spans(costs)
        busy = sum(span.busy for span in spans)
        if self.work.waits_for_messages:
            placement = self.work.placement
            # The interleaved function exchanges those of a forward and of a backward in one call.
            waiting = costs.waiting_for_messages(placement, at_once=placement.chunks > 1)
            # No message is on its way for less time than without.
            spans = max(spans, self.order.timer.spans(waiting), key=_makespan)
        makespan = _makespan(spans)
        bubble = 1 - busy / (len(spans) * makespan)
        # The bubble of a single rank may round to below nothing.
        return Pace(makespan + waits_around(self.work, spans), makespan, max(0.0, bubble))

    def estimate(self) -> Estimate:
        """Return the whole estimate."""
        work, schedule = self.work, self.order.timer.schedule
        job, gpus, seconds = work.job, work.gpus, self.pace.step_seconds
        samples = job.batch.micro_batch_size * work.data * self.microbatches
        tokens = job.model.seq_length * samples
        file = job.pipeline.pipeline_costs if work.model.measured else None
        error_band = None if file else band(work, self.name)
        for addition in additions():
            error_band = error_band and error_band.beyond(*addition.unmeasured(schedule))
        possible = seconds * gpus * work.system.peak(job.precision.format)
        waiting = self.order.in_flight.waiting(work.parts) if schedule.splits_backward else ()
        return Estimate(
            step_seconds=seconds,
            pipeline_seconds=self.pace.pipeline_seconds,
            bubble=self.pace.bubble,
            utilisation=None if work.model.counts_weights else model_operations(job, samples) / possible,
            tokens_per_second=tokens / seconds,
            ranks=self.memory(),
            band=error_band,
            stages_from=str(file) if file else None,
            waiting_bytes=tuple(schedule.share * size for size in waiting),
            gather_bytes=work.model.gather_buffers if waiting else 0.0,
        )

    @property
    def _unflushed(self) -> Unflushed:
        return Unflushed(self.work, sizes.described(self.work.job, self.name, self.microbatches))


def _makespan(spans: Sequence[RankSpan]) -> float:
    return max(span.end for span in spans)


def _unflushed_pace(unflushed: Unflushed) -> Pace:
    """Return how long a step takes from update to update; its pipeline is one whose updates take no time."""
    of_stages = unflushed.updates.replicas
    pipeline = unflushed.seconds([0.0] * of_stages.stages)
    busy = sum(map(mul, of_stages.counts, unflushed.working))
    bubble = 1 - busy / (of_stages.ranks * pipeline)
    return Pace(unflushed.seconds(unflushed.updating), pipeline, max(0.0, bubble))


def planning_costs(job: Job) -> CostModel:
    """Return the costs by which training plans slices of ``job``: its arithmetic, whatever the machine."""
    return cost_model(job, lambda job, placement: stage_costs(job, placement, job.padded_vocabulary))


def estimate_request(job: Job, system: System, request: Request, margin: float = MARGIN) -> Estimate:
    """Estimate a step of ``request``, the pipeline of ``job``, which must have a ``vocab_size``.

    ValueError for layers that do not fill the stages, for a limit of ``flex`` that cannot be kept, and for
    ``auto``, whose limit only a run can measure.
    """

    def work_on(placement: Placement) -> Workload:
        return Workload(job, system, placement, request.data)

    name, microbatches = request.schedule, request.microbatches
    can = catalog.abilities(name)
    if can.measures_memory:
        raise ValueError(
            f"--pipeline-schedule {name} cannot be estimated before a run: use flex with "
            "--pipeline-memory-limit, or a schedule of mpp list"
        )
    result = make(request, CostModel(lambda placement: work_on(placement).costs, planning_costs(job).at))
    work = work_on(result.schedule.placement)
    estimated = StepModel(work, Prepared(result.schedule), name, microbatches, margin).estimate()
    for addition in additions():
        estimated = addition.completed(estimated, work, result.schedule)
    if request.updates is not None:
        stage, least = Unflushed(work, request.updates).busiest
        each = estimated.step_seconds / microbatches
        return replace(estimated, note=_LONG_RUN.format(each, stage, least / microbatches))
    cautions = (option.caution(request.ranks, work.costs) for option in request.options)
    return replace(estimated, note=next(filter(None, cautions), result.note))


def pipeline_seconds(job: RequestedJob, data: int, schedule: Schedule, device: str) -> float | None:
    """Return the seconds from the first action of ``schedule`` to its last end, by the rates of ``device``.

    It is the schedule of ``job``, with a flush, on ``data`` data-parallel ranks.  The device is named as its
    driver does; None where no shipped system has its rates.  ValueError for a job that cannot be estimated.
    """
    machine = of_device(device)
    if machine is None:
        return None
    all_rules.refuse_to_plan(job)
    name = job.pipeline.pipeline_schedule
    assert name is not None
    work = Workload(job, machine, schedule.placement, data)
    return StepModel(work, Prepared(schedule), name, schedule.microbatches).pace.pipeline_seconds


def waits_around(work: Workload, spans: tuple[RankSpan, ...]) -> float:
    """Return the seconds that a step takes beyond its pipeline.

    An overlapped reduction is hidden, but for its last bucket, by the rank's last backward and the time until
    the last rank ends; an overlapped gathering by the time until the rank's first action, and one forward.
    """
    last = _makespan(spans)
    after = before = update = 0.0
    for rank, span in enumerate(spans):
        wait = work.exposed(rank)
        after = max(after, span.end + work.deferred_seconds(rank) + wait.reduction - last)
        before = max(before, wait.gathering - span.start)
        update = max(update, wait.update)
    return before + after + work.tied_seconds + update
