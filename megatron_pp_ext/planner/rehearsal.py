"""An estimate of a whole pipeline from the measurements of some ranks, each of which ran alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median, quantiles

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.processor import MOST_WAITED
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective, RankRehearsal
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer

PLACES = ("first", "middle", "last")
"""The names of ranks for --ranks, besides their numbers and ``all``."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """The most bytes that one rank of the pipeline holds, by purpose.

    ``rehearsed_on`` is the rank that these were measured on; if it is another rank, the peak of
    ``activations`` is simulated.  ``messages`` are as many as may wait, since a rank alone sends none.
    """

    rehearsed_on: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float

    @property
    def total(self) -> float:
        """The sum, as if the peak of activations occurred together with all other peaks."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The estimate of the pipeline: a simulated step, and the bytes of every rank.

    In ``timeline`` every action takes the typical time of its kind.  ``pipeline_seconds`` is the median over
    the measured steps, each simulated with the times of its single actions.
    """

    timeline: Timeline
    pipeline_seconds: float
    outside_seconds: float
    ranks: tuple[RankBytes, ...]

    @property
    def step_seconds(self) -> float:
        """The time from the first action of a step to that of the next; all ranks meet in the optimizer."""
        return self.pipeline_seconds + self.outside_seconds


def chosen_ranks(words: str, ranks: int) -> list[int]:
    """Return the ranks named as in ``first,last``, ``0,3`` or ``all``; ValueError for anything else."""
    numbers = dict(zip(PLACES, (0, ranks // 2, ranks - 1), strict=True))
    selected: set[int] = set()
    for word in words.split(","):
        if word == "all":
            selected |= set(range(ranks))
        elif word in numbers:
            selected.add(numbers[word])
        elif word.isdecimal() and int(word) < ranks:
            selected.add(int(word))
        else:
            raise ValueError(
                f"--ranks got {word!r}, but takes {', '.join(PLACES)}, all or numbers from 0 to {ranks - 1}, "
                "with commas between: correct it"
            )
    return sorted(selected)


def stand_in(rank: int, rehearsed: Sequence[int], ranks: int) -> int:
    """Return the rank whose measurements ``rank`` uses: itself if it is rehearsed, or else the nearest one.

    Ranks between the first and the last are preferred where any of them is rehearsed.
    """
    if rank in rehearsed:
        return rank
    inner = [other for other in rehearsed if 0 < other < ranks - 1]
    return min(inner or rehearsed, key=lambda other: abs(other - rank))


def put_together(
    measured: Mapping[int, RankRehearsal], schedule: Schedule, system: System | None, world: int
) -> Rehearsal:
    """Simulate ``schedule`` with the measurements of the rehearsed ranks, ``measured``.

    Collectives and messages take as long as on ``system``; all messages take the slowest link between any of
    the ``world`` ranks.  Without a system, they take no time.  The reduction of gradients is not included.
    Actions that run together hide all that their tokens travel, as if no exchange were longer than the
    computation meanwhile.

    Raises ValueError where ranks ran different schedules, or where one would stand in for a rank whose
    stages have other numbers of layers.

    A rehearsed rank runs its own actions in their real order, with made-up tensors in place of its
    neighbours' messages.  This measures the seconds of its actions and its peak of memory; how the ranks wait
    for each other is simulated.

    An action does not take the same time twice, and ranks that wait for each other wait for the slower one,
    so that a step in which all actions took their mean would come out too short.  Therefore every measured
    step is simulated with the time of each single action.
    """
    for rehearsal in measured.values():
        if rehearsal.digest != schedule.digest:
            raise ValueError(
                f"rank {rehearsal.rank} rehearsed another schedule than rank {min(measured)}: start again, "
                "and give flex its --pipeline-costs"
            )
    placement, layers = schedule.placement, next(iter(measured.values())).layers
    source = [stand_in(rank, sorted(measured), placement.ranks) for rank in range(placement.ranks)]
    for rank, other in enumerate(source):
        layer_counts, other_counts = (
            [layers[stage] for stage in placement.stages_of(r)] for r in (rank, other)
        )
        if layer_counts != other_counts:
            raise ValueError(
                f"rank {rank} has stages of {layer_counts} layers and rank {other}, which would stand in "
                f"for it, of {other_counts}: set --ranks all, or name rank {rank} as well"
            )
    stages = tuple(
        _stage(measured[source[placement.rank_of(stage)]], placement.chunk_of(stage), system)
        for stage in range(placement.stages)
    )
    message = next(iter(measured.values())).message_bytes
    latency = 0.0
    if system is not None:
        latency = system.message_link(placement.ranks, world // placement.ranks).seconds(message)
    hidden = sum(
        # The tokens of a microbatch travel between experts, there and back, both ways.
        _waits(measured[source[placement.rank_of(stage)]], system, placement.chunk_of(stage), "all_to_all")
        for stage in range(placement.stages)
    )
    head = _head(measured.values(), system, latency)
    alone = sum(stage.forward + stage.seconds(Kind.B) for stage in stages)
    costs = Costs(stages, latency, message, head)
    timeline = simulate(schedule, costs.hiding(hidden, alone) if schedule.paired else costs)
    waiting = timeline.peak_messages
    ranks = tuple(
        RankBytes(
            other,
            measured[other].weight_bytes,
            measured[other].gradient_bytes,
            measured[other].optimizer_bytes,
            measured[rank].peak_activation_bytes if other == rank else timeline.peak_activations[rank],
            waiting[rank] * message,
        )
        for rank, other in enumerate(source)
    )
    outside = max(rehearsal.outside_seconds for rehearsal in measured.values())
    return Rehearsal(timeline, _pipeline_seconds(timeline, measured, source), outside, ranks)


def _pipeline_seconds(
    timeline: Timeline, measured: Mapping[int, RankRehearsal], source: Sequence[int]
) -> float:
    """Return the median over measured steps, in which each action is longer or shorter by its ratio there.

    Ranks with the same stand-in take the ratios of different steps, so that they are not all slow at once.
    """
    schedule, costs = timeline.schedule, timeline.costs
    placement = schedule.placement

    def on_its_rank(action: Action) -> tuple[int, Kind, int]:
        return placement.chunk_of(action.stage), action.kind, action.microbatch

    positions = [{on_its_rank(action): at for at, action in enumerate(order)} for order in schedule.orders]
    steps = min(len(rehearsal.ratios) for rehearsal in measured.values())

    def seconds(step: int, action: Action) -> float:
        rank = placement.rank_of(action.stage)
        other = source[rank]
        place = positions[other].get(on_its_rank(action))
        if place is None:  # The stand-in may do a B where this rank does I and W.
            return costs.seconds(action)
        return costs.seconds(action) * measured[other].ratios[(step + rank - other) % steps][place]

    if not steps:
        return timeline.makespan
    timer = ScheduleTimer(schedule)
    return median(timer.makespan(partial(seconds, step), costs) for step in range(steps))


def _stage(measured: RankRehearsal, chunk: int, system: System | None) -> StageCosts:
    """Return the chunk's costs, with the time of its collectives."""
    costs = measured.stages[chunk]
    return replace(
        costs,
        forward=costs.forward + _waits(measured, system, chunk, Kind.F),
        input_gradient=costs.input_gradient + _waits(measured, system, chunk, Kind.I, Kind.B),
        weight_gradient=costs.weight_gradient + _waits(measured, system, chunk, Kind.W),
    )


def _head(measured: Iterable[RankRehearsal], system: System | None, latency: float) -> HeadCosts | None:
    """Return the mean costs of the ranks' parts of a split head, of which all but one are equal."""
    parts = [(rehearsal, rehearsal.head) for rehearsal in measured if rehearsal.head is not None]
    if not parts:
        return None
    alone = HeadCosts(
        scores=mean(part.scores + _waits(rehearsal, system, 0, Kind.S) for rehearsal, part in parts),
        weight_gradient=mean(part.weight_gradient for _, part in parts),
        activation=mean(part.activation for _, part in parts),
    )
    return alone.exchanged_over(latency)


def _waits(measured: RankRehearsal, system: System | None, chunk: int, *during: Kind | str) -> float:
    """Return the seconds of a microbatch's collectives ``during`` some kinds of actions, or of some kinds."""
    return sum(
        seconds(collective, system)
        for collective in measured.collectives
        if system is not None
        and collective.chunk == chunk
        and (collective.operation in during or collective.kind in during)
    )


def seconds(collective: Collective, system: System) -> float:
    """Return how long every rank of the group waits for ``collective``."""
    take = {
        "all_reduce": system.all_reduce_seconds,
        "gather": system.gather_seconds,
        "all_to_all": system.all_to_all_seconds,
    }
    return take[collective.operation](collective.size, collective.ranks, collective.stride)


MOST_SPREAD = 0.2
"""The most that the middle half of a rank's timed steps may spread, as a part of their median.

Rehearsed steps differ from real ones by up to a tenth on a quiet machine (benchmarks/results/rehearse.md), so
that a wider spread comes from the machine more than from the job.
"""


def described(measured: Iterable[RankRehearsal]) -> str:
    """Return a line with the widest spread of a rank's steps, its longest waits, and the machine's load."""
    ranks = list(measured)
    words = []
    repeated = [rank for rank in ranks if len(rank.step_seconds) > 1]
    if repeated:
        worst = max(repeated, key=_spread)
        low, _, high = quantiles(worst.step_seconds, method="inclusive")
        words.append(
            f"timed steps spread most on rank {worst.rank}, where the middle half of "
            f"{len(worst.step_seconds)} took {low:.4g} to {high:.4g} s"
        )
    else:
        words.append("too few timed steps to tell how they spread")
    waits = [rank.waited for rank in ranks if rank.waited is not None]
    if waits:
        words.append(f"ranks waited for a processor for up to {max(waits):.1%} of their time")
    loads = [rank.load for rank in ranks if rank.load is not None]
    if loads:
        words.append(f"the machine's load was up to {max(loads):.2g} a processor")
    return "; ".join(words)


def disturbance(measured: Iterable[RankRehearsal]) -> str | None:
    """Return why a rank's seconds depend more on its machine than on the job; None if no rank's do."""
    for rehearsal in measured:
        if rehearsal.waited is not None and rehearsal.waited > MOST_WAITED:
            return (
                f"rank {rehearsal.rank} waited for a processor for {rehearsal.waited:.0%} of its time, "
                f"more than {MOST_WAITED:.0%}"
            )
        if len(rehearsal.step_seconds) > 1 and _spread(rehearsal) > MOST_SPREAD:
            return (
                f"the middle half of the steps of rank {rehearsal.rank} spread over "
                f"{_spread(rehearsal):.0%} of their median, more than {MOST_SPREAD:.0%}"
            )
    return None


def require_quiet(measured: Iterable[RankRehearsal]) -> None:
    """Raise ValueError where a rank's seconds depend more on its machine than on the job."""
    reason = disturbance(measured)
    if reason is not None:
        raise ValueError(
            f"the seconds are not to be believed: {reason}: end what else runs, lower --at-once, raise "
            "--iterations, or add --accept-noise"
        )


def _spread(rehearsal: RankRehearsal) -> float:
    low, _, high = quantiles(rehearsal.step_seconds, method="inclusive")
    return (high - low) / median(rehearsal.step_seconds)
