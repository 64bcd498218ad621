"""Estimates of a training step: the models of time and of memory, put together.

The step's pipeline is replayed action by action with the seconds of every stage.  The step also takes the
time that ranks wait for gradients that are not reduced under later work, for the update, and for weights that
are not gathered under the first forward.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_pp_ext.planner.step.error_band import Band, band
from megatron_pp_ext.planner.step.model_state import ModelState
from megatron_pp_ext.planner.step.programs import Prepared, Program, program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.planner.system import System
from megatron_pp_ext.request import updates
from megatron_pp_ext.request.csv_schedule import require_microbatches
from megatron_pp_ext.request.pipeline import Request
from megatron_pp_ext.request.vocabulary_source import requested_source
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.names import AUTO, CSV_PREFIX, FLEX, FLUSH_FREE
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import Span

MARGIN = 0.05
"""The memory that allocators leave unused and that is not modelled (kernels' workspace), as a fraction of the
memory that comes and goes in a step: activations, messages and the loss's workspace."""

_UNPROVED = (
    "a pair takes {:.2f} of its forward and backward; no published run in pairs was compared with this"
)
"""The note of an estimate in pairs; it takes ``Costs.pair``."""


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
    margin: float
    reserved: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all components."""
        state = self.weights + self.gradients + self.optimizer + self.versions
        return state + self.activations + self.messages + self.loss + self.margin + self.reserved

    def components(self) -> Iterator[tuple[str, float]]:
        """Yield every component with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a training step; ``ranks`` is the memory of every pipeline rank.

    ``pipeline_seconds`` last from the first action of any rank to the last end, ``other_seconds`` are those
    that ranks wait before and after it.  ``bubble`` is the idle fraction of the ranks' time in the pipeline;
    ``utilisation`` is of the machine's peak, for model operations, which leave recomputation out.  ``band``
    says how far published runs were from their estimates, ``note`` what people should know of the schedule.
    """

    step_seconds: float
    pipeline_seconds: float
    bubble: float
    utilisation: float
    tokens_per_second: float
    ranks: tuple[RankMemory, ...]
    band: Band
    note: str = ""

    @property
    def other_seconds(self) -> float:
        """The seconds that the step takes beside the pipeline."""
        return self.step_seconds - self.pipeline_seconds

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


def memory(
    work: Workload, order: Prepared, name: str, microbatches: int, margin: float = MARGIN
) -> tuple[RankMemory, ...]:
    """Return what every rank keeps in steps of ``microbatches`` under schedule ``order``, called ``name``."""
    ranks = work.placement.ranks
    if name in FLUSH_FREE:
        # The pipeline is full, however few microbatches an update has, and earlier ones sent messages.
        order = program(name, ranks, ranks + SENDS_AHEAD, 1)
    shared = work.vocabulary
    activations = order.in_flight.peaks(work.parts, shared.activation if shared else 0.0)
    peaks = zip(activations, order.peak_messages, strict=True)
    return tuple(
        rank_memory(work, rank, *peak, margin, _older_versions(work, name, rank, microbatches))
        for rank, peak in enumerate(peaks)
    )


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
) -> RankMemory:
    """Return the memory of a rank of ``work`` with this ``state`` and so many bytes for the loss."""
    buffers = messages * work.message + work.exchanged_bytes
    return RankMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        versions=older * state.weights,
        activations=activations,
        messages=buffers,
        loss=loss,
        margin=margin * (activations + buffers + loss),
        reserved=work.system.reserved_bytes,
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a step and of its pipeline, and the idle fraction of the ranks' time in the latter."""

    step_seconds: float
    pipeline_seconds: float
    bubble: float


def pace(work: Workload, order: Prepared, name: str, microbatches: int) -> Pace:
    """Return how long a step of ``microbatches`` takes under the schedule ``order``, called ``name``."""
    spans = order.timer.spans(work.costs)
    makespan = max(span.end for span in spans)
    if name in FLUSH_FREE:
        # Nothing drains between steps: a step takes what its microbatches add to a long run.
        ranks = work.placement.ranks
        full = max(microbatches, 2 * ranks)
        short, longer = (
            max(span.end for span in program(name, ranks, count, 1).timer.spans(work.costs))
            for count in (full, full + microbatches)
        )
        makespan = longer - short
    bubble = 1 - sum(span.busy for span in spans) / (len(spans) * makespan)
    # The bubble of a single rank may round to below nothing.
    return Pace(makespan + waits_around(work, spans), makespan, max(0.0, bubble))


def estimate(
    work: Workload,
    order: Prepared,
    name: str,
    microbatches: int,
    margin: float = MARGIN,
    paced: Pace | None = None,
) -> Estimate:
    """Estimate a step of ``microbatches`` under the schedule ``order``, called ``name``.

    ``paced`` is what ``pace`` returned for the same, where that is known.
    """
    found = paced or pace(work, order, name, microbatches)
    args = work.args
    gpus = work.model_ranks * work.data
    dtype = ("fp8" if args.fp8 else "bf16") if args.bf16 or args.fp16 else "fp32"
    tokens = args.seq_length * args.micro_batch_size * work.data * microbatches
    seconds = found.step_seconds
    return Estimate(
        step_seconds=seconds,
        pipeline_seconds=found.pipeline_seconds,
        bubble=found.bubble,
        utilisation=work.operations(microbatches) / (seconds * gpus * work.system.peak(dtype)),
        tokens_per_second=tokens / seconds,
        ranks=memory(work, order, name, microbatches, margin),
        band=band(args, work.system, gpus),
    )


def estimate_request(args: Namespace, system: System, request: Request, margin: float = MARGIN) -> Estimate:
    """Estimate a step of ``request``, the reading of ``args``, which must have a ``vocab_size``.

    ValueError for layers that do not fill the stages, for a limit of ``flex`` that cannot be kept, and for
    ``auto``, whose limit only a run can measure.
    """

    def work_on(placement: Placement) -> Workload:
        return Workload(args, system, placement, request.data, is_split=request.splits_backward)

    def costs_of(stages: int, shares_vocabulary: bool) -> Costs:
        return work_on(replace(request.finest, shares_vocabulary=shares_vocabulary)).costs

    name, microbatches = request.schedule, request.microbatches
    if name == AUTO:
        raise ValueError(
            f"--pipeline-schedule {name} cannot be estimated before a run: use flex with "
            "--pipeline-memory-limit, or a schedule of mpp list"
        )
    if name == FLEX or request.vocabulary is not None:
        source = requested_source(request, costs_of)
        schedule = source.build(microbatches, None)
        found = estimate(work_on(schedule.placement), Program(schedule), name, microbatches, margin)
        return replace(found, note=source.note)
    placement = request.placement
    if request.from_file is not None:
        require_microbatches(request.from_file, name.removeprefix(CSV_PREFIX), microbatches)
        order = Program(request.from_file)
    else:
        order = program(name, request.ranks, microbatches, placement.chunks, is_paired=request.is_paired)
    work = work_on(placement)
    found = estimate(work, order, name, microbatches, margin)
    return replace(found, note=_UNPROVED.format(work.costs.pair)) if request.is_paired else found


def waits_around(work: Workload, spans: tuple[Span, ...]) -> float:
    """Return the seconds that a step takes beyond its pipeline.

    An overlapped reduction has the rank's last backward, and the time until the last rank ends, to hide
    behind, all but its last bucket; an overlapped gathering has the time until the rank's first action,
    and one forward.
    """
    args = work.args
    last = max(span.end for span in spans)
    after = before = update = 0.0
    for rank, (wait, span) in enumerate(zip(work.waits, spans, strict=True)):
        exposed, gathered = wait.reduction, wait.gathering
        least = work.last_bucket(rank)
        if args.overlap_grad_reduce:
            exposed = max(least * exposed, exposed - work.backward_seconds(rank))
        if args.overlap_param_gather:
            gathered = max(least * gathered, gathered - work.by_rank[rank].forward_seconds)
        after = max(after, span.end + exposed - last)
        before = max(before, gathered - span.start)
        update = max(update, wait.update)
    return before + after + work.tied_seconds + update


def _older_versions(work: Workload, name: str, rank: int, microbatches: int) -> int:
    """Return the number of copies of a rank's weights that its microbatches in flight still need."""
    if name not in FLUSH_FREE:
        return 0
    straight = Replicas.straight(work.placement.ranks)
    return updates.described(work.args, name, microbatches, straight).copies(rank)
