"""How long a training step takes, and what every rank keeps: the models of time and of memory, put together.

The step's pipeline is replayed action by action with the seconds of every stage.  Around it come what
ranks wait for: gradients that are not reduced under later work, the update, weights that are not gathered
under the first forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from megatron_pp_ext.planner.step.programs import FLUSH_FREE, Program, program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.replay import Span

MARGIN = 0.05
"""What allocators leave unused and what nobody counts (kernels' workspace), as a fraction of what comes and
goes in a step: activations, messages, and what the loss needs."""


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

    @property
    def total(self) -> float:
        """All together."""
        state = self.weights + self.gradients + self.optimizer + self.versions
        return state + self.activations + self.messages + self.loss + self.margin

    def components(self) -> Iterator[tuple[str, float]]:
        """Every component with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step of training: seconds, and what fills them; ``ranks`` is the memory of every pipeline rank.

    ``pipeline`` is from the first action of any rank to the last end, ``others`` what is waited for
    before and after it.  ``bubble`` is the fraction of the ranks' time in the pipeline that they idle;
    ``utilisation`` is of the machine's peak, for model operations, which leave recomputation out.
    """

    step_seconds: float
    pipeline_seconds: float
    bubble: float
    utilisation: float
    tokens_per_second: float
    ranks: tuple[RankMemory, ...]

    @property
    def other_seconds(self) -> float:
        """What the step takes beside the pipeline."""
        return self.step_seconds - self.pipeline_seconds

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


def memory(
    work: Workload, order: Program, name: str, microbatches: int, margin: float = MARGIN
) -> tuple[RankMemory, ...]:
    """What every rank keeps in steps of ``microbatches`` under the schedule ``order``, called ``name``."""
    ranks = work.placement.ranks
    if name in FLUSH_FREE:
        # A full pipeline, however few microbatches an update has, and messages sent in earlier ones.
        order = program(name, ranks, ranks + SENDS_AHEAD, 1)
    peaks = zip(order.in_flight.peaks(work.parts), order.peak_messages, strict=True)
    return tuple(
        rank_memory(
            work, rank, activations, messages, margin, _older_versions(work, name, rank, microbatches)
        )
        for rank, (activations, messages) in enumerate(peaks)
    )


def rank_memory(
    work: Workload, rank: int, activations: float, messages: int, margin: float, older: int = 0
) -> RankMemory:
    """What ``rank`` keeps beside so many bytes of activations, ``messages`` and ``older`` weight versions."""
    state = work.states[rank]
    loss = work.loss_workspace if rank == work.head_rank else 0.0
    buffers = messages * work.costs.message
    return RankMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        versions=older * state.weights,
        activations=activations,
        messages=buffers,
        loss=loss,
        margin=margin * (activations + buffers + loss),
    )


def estimate(
    work: Workload, order: Program, name: str, microbatches: int, margin: float = MARGIN
) -> Estimate:
    """A step of ``microbatches`` under the schedule ``order``, called ``name``."""
    spans = order.replay.spans(work.costs)
    makespan = max(span.end for span in spans)
    bubble = 1 - sum(span.busy for span in spans) / (len(spans) * makespan)
    if name in FLUSH_FREE:
        # Nothing drains between steps: a step takes what its microbatches add to a long run.
        ranks = work.placement.ranks
        full = max(microbatches, 2 * ranks)
        short, longer = (
            max(span.end for span in program(name, ranks, count, 1).replay.spans(work.costs))
            for count in (full, full + microbatches)
        )
        makespan = longer - short
        bubble = 1 - sum(span.busy for span in spans) / (len(spans) * makespan)
    step = makespan + waits_around(work, spans)
    args = work.args
    gpus = work.model_ranks * work.data
    dtype = ("fp8" if args.fp8 else "bf16") if args.bf16 or args.fp16 else "fp32"
    tokens = args.seq_length * args.micro_batch_size * work.data * microbatches
    return Estimate(
        step_seconds=step,
        pipeline_seconds=makespan,
        bubble=max(0.0, bubble),  # that of a single rank may round to below nothing
        utilisation=work.operations(microbatches) / (step * gpus * work.system.peak(dtype)),
        tokens_per_second=tokens / step,
        ranks=memory(work, order, name, microbatches, margin),
    )


def waits_around(work: Workload, spans: tuple[Span, ...]) -> float:
    """Seconds that a step takes beyond its pipeline.

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
    """Versions of a rank's weights beside the newest: what its microbatches in flight still need."""
    if name not in FLUSH_FREE:
        return 0
    latest = pipedream.Weights.SAME if work.args.pipeline_vertical_sync else pipedream.Weights.LATEST
    weights = latest if name == "pipedream" else pipedream.Weights.PREVIOUS
    return pipedream.most_versions(weights, rank, work.placement.ranks, microbatches)
