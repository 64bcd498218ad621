"""What a configuration needs at least, whatever the order: no step is shorter, and no rank keeps less.

time    a rank does all its F, I and W, and all S and T of a split head, one after the other, the first
        microbatch has to reach it, and where backwards are whole, its last gradient has to travel back to
        the first stage.  Only a T may still follow that gradient.
memory  weights, gradients and optimizer state, one microbatch's activations of all of a rank's stages, as
        the backward of its first stage waits for the forward of its last, and the fewest messages.  If ranks
        split the head, a microbatch's S falls between the two.  Where a search tries variants
        (``Variants``), those of one stage may be elsewhere while another runs, so that only the largest
        stage's count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.compiler.limits import least_messages
from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.optimizers import ModelState, model_state
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.stages import end_parts, kept_input, prediction_parts
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import UnitWork
from megatron_pp_ext.planner.step.estimate import RankMemory, memory_beside, rank_memory
from megatron_pp_ext.planner.step.programs import short_program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement, Shape


class LeastSeconds(NamedTuple):
    """The seconds of a microbatch that a stage takes at least, with a whole backward.

    ``first``, ``middle`` and ``last`` are those of a stage with its layers in ``fewest``, and ``layer`` those
    that one more layer adds.  ``forwards`` are those of a forward of the first stage and of a middle one.
    """

    first: float
    middle: float
    last: float
    layer: float
    forwards: tuple[float, float]
    fewest: tuple[int, int, int]


class ModelSums:
    """Sums over ``model``, of which all that follows from the cut of its layers is left out.

    ``seconds`` are those of a microbatch in all of it, where nothing is computed again.

    A sum over all stages is one over all layers, and a model has few kinds of these.  Only which layers are
    computed again depends on the stages, where every stage recomputes its first ones.
    """

    def __init__(self, model: ModelParts) -> None:
        self.model = model
        kinds = {id(layer): layer for layer in model.layers}
        self._kinds = tuple(kinds.values())
        # By kind: how many layers of it there are in front of each, and after the last.
        of_kind = np.array([[id(layer) == key for layer in model.layers] for key in kinds])
        self._before = np.concatenate([np.zeros((len(kinds), 1), int), of_kind.cumsum(axis=1)], axis=1)
        seconds = np.array([_seconds(layer) for layer in model.layers])
        forwards = np.array([layer.forward_seconds for layer in model.layers])
        self._plain, self._again, self._forwards = seconds, seconds + forwards, forwards
        ends = end_parts(model, splits_head=False)
        self.seconds = float(seconds.sum()) + sum(_seconds(part) for parts in ends for part in parts)
        self._totals: dict[tuple[object, ...], Part] = {}
        self._least: dict[tuple[object, ...], LeastSeconds] = {}

    def total(self, job: Job, cut: Sequence[int], splits_head: bool) -> Part:
        """Return the sum of the parts of all stages of ``cut``, whose temporary bytes are left out."""
        is_full, size = job.memory.recomputes_layers, job.memory.recomputed_together
        input_bytes = kept_input(job, self.model.hidden_bytes)
        if is_full and (job.memory.recomputes_first or size > 1):
            layers = self._recomputed(job, cut, size, input_bytes)
        else:
            key = (is_full,)
            if key not in self._totals:
                self._totals[key] = self._sum(
                    self._before[:, -1] * is_full, len(self.model.layers), input_bytes
                )
            layers = self._totals[key]
        other_parts = self._beside(job, splits_head, is_one=len(cut) == 1)
        return layers + other_parts + self.model.other.times(len(cut))

    def least(self, job: Job, fewest: Sequence[int], splits_head: bool) -> LeastSeconds:
        """Return lower bounds of stage seconds if the first, each middle and the last have so many layers."""
        few = fewest[0], fewest[1], fewest[-1]
        is_full, is_block = job.memory.recomputes_layers, job.memory.recomputes_first
        key = is_full, is_block, few, splits_head
        if key not in self._least:
            seconds = self._again if is_full else self._plain
            first, last = map(_summed, zip(*end_parts(self.model, splits_head), strict=True))
            last += prediction_parts(job, self.model, has_embedding=True)[1]
            other = self.model.other
            bare = other + first, other, other + last
            took = [
                _seconds(part) + _shortest_run(seconds, count) for part, count in zip(bare, few, strict=True)
            ]
            self._least[key] = LeastSeconds(
                first=took[0],
                middle=took[1],
                last=took[2],
                layer=float((self._plain if is_block else seconds)[few[1] :].min()),
                forwards=(
                    bare[0].forward_seconds + _shortest_run(self._forwards, few[0]),
                    bare[1].forward_seconds + _shortest_run(self._forwards, few[1]),
                ),
                fewest=few,
            )
        return self._least[key]

    def _beside(self, job: Job, splits_head: bool, is_one: bool) -> Part:
        """Return the parts of the stages besides their layers, or of the only one, but for each one's own."""
        key = "beside", splits_head, is_one
        if key not in self._totals:
            ends = [part for parts in end_parts(self.model, splits_head) for part in parts]
            self._totals[key] = _summed([*ends, *prediction_parts(job, self.model, has_embedding=is_one)])
        return self._totals[key]

    def _recomputed(self, job: Job, cut: Sequence[int], size: int, input_bytes: float) -> Part:
        """Return the sum of the layers where the recomputed ones depend on the stages.

        These are the first ``size`` of each stage, or all in groups of ``size``.
        """
        counts, ends = np.array(cut), np.array([*accumulate(cut)])
        starts = ends - counts
        if not job.memory.recomputes_first:
            return self._sum(self._before[:, -1], int((-(-counts // size)).sum()), input_bytes)
        again = np.minimum(counts, size)
        by_kind = (self._before[:, starts + again] - self._before[:, starts]).sum(axis=1)
        return self._sum(by_kind, int(again.sum()), input_bytes)

    def _sum(self, again: NDArray[np.float64], groups: int, input_bytes: float) -> Part:
        """Return the sum of all layers, of which so many of each kind are computed ``again``.

        They are in ``groups``, each of which keeps ``input_bytes``.
        """
        counts = zip(self._kinds, self._before[:, -1].tolist(), again.tolist(), strict=True)
        parts = [
            part
            for kind, count, repeated in counts
            for part in (kind.times(count - repeated), kind.recomputed(after_forward=0.0).times(repeated))
        ]
        return _summed([*parts, Part(after_forward=groups * input_bytes * bool(again.any()))])


def _seconds(part: Part) -> float:
    return part.forward_seconds + part.backward_seconds - part.overlapped_in_whole


def _shortest_run(seconds: NDArray[np.float64], count: int) -> float:
    before = np.concatenate([[0.0], seconds.cumsum()])
    return float((before[count:] - before[: len(before) - count]).min())


def _summed(parts: Sequence[Part]) -> Part:
    first, *remaining = parts
    return sum(remaining, first)


def bounds(work: Workload, microbatches: int, units: UnitWork | None = None) -> tuple[float, float]:
    """Return two lower bounds on a step in seconds: with whole backwards, and with split ones.

    In every placement stage r is the first one of rank r.  Where actions may run together, each takes its
    part of their time at least.  ``units`` are those of microbatches that are cut.
    """
    if units:
        busiest = max(map(_seconds, work.by_rank))
        least = units.microbatch * microbatches * busiest
        return least, least
    shared = work.costs.head
    logits, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
    latency, head, tail, whole, split = work.costs.hop, 0.0, 0.0, 0.0, 0.0
    for stage, rank_part in zip(work.costs.stages, work.by_rank, strict=False):
        # In split backwards, too, a W may run inside of every I.
        seconds = rank_part.forward_seconds + rank_part.backward_seconds - rank_part.overlapped_in_whole
        busy = head + microbatches * (seconds + logits + last)
        split, whole = max(split, busy), max(whole, busy, busy - microbatches * last + tail)
        head += stage.forward + latency
        tail += stage.seconds(Kind.B) + latency
    around = max(wait.update for wait in work.waits) + work.tied_seconds
    together = work.together(work.parts)
    return together * whole + around, together * split + around


@dataclass(frozen=True)
class MeanRank:
    """The average rank of ``work``: ``part``, which is the same under every cut into stages.

    ``least`` has lower bounds of the stages' seconds, and ``units`` are those of microbatches that are cut.
    """

    work: Workload
    part: Part
    least: LeastSeconds
    units: UnitWork | None = None

    @cached_property
    def state(self) -> ModelState:
        """The weights, gradients and optimizer state."""
        return model_state(self.work.job, self.part, self.work.sharing)

    def memory(
        self, microbatches: int, margin: float, activations: float | None = None, of_largest: bool = False
    ) -> RankMemory:
        """Return a lower bound on an average rank's memory in any order; under no cut the fullest needs less.

        ``activations`` are their bytes, if more are known than ``least_memory`` counts, for which
        ``of_largest`` means the same.
        """
        work = self.work
        if activations is None:
            # The largest stage of a rank keeps no less than the mean of its stages.
            whole = self.part.after_forward
            activations = _least_kept(work, whole, whole / work.placement.chunks, of_largest)
        messages = _mean_messages(work.placement, microbatches) / work.units
        model, parts = work.model, work.placement.ranks * work.units
        loss = (model.split_workspace if work.placement.splits_head else model.loss_workspace) / parts
        return memory_beside(work, self.state, loss, activations, messages, margin)

    def bounds(self, microbatches: int) -> tuple[float, float]:
        """Return the two lower bounds of ``bounds``, for any cut of the layers into stages.

        Every cut has the same work in all, T a microbatch, and its busiest rank at least ``busiest_rank``.
        Rank r starts after the forwards of r stages, and with whole backwards it ends before their backwards.
        On one stage a rank, with t_r a
        microbatch, the step Z is at least m t_r + t_0 + ... + t_(r-1) for every r, which adds up to
        T <= Z (1 - (1 - 1/m)^p).
        """
        work, part, shared = self.work, self.part, self.work.head
        mean = part.forward_seconds + part.backward_seconds - part.overlapped_in_whole
        logits, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        ranks = work.placement.ranks
        vocabulary, least = logits + last, self.least
        busiest = busiest_rank(least, work.placement, len(work.model.layers))

        def way(first: float, middle: float) -> float:
            """Return the seconds of the stages before the mean rank's first one, with the messages."""
            return (ranks - 1) / ranks * (first + (ranks - 2) / 2 * middle) + (ranks - 1) / 2 * work.hop

        if self.units:
            microbatch, first = self.units
            busy = microbatch * microbatches * mean
            return busy + first * way(least.first, least.middle), busy + first * way(*least.forwards)
        busy = microbatches * (max(mean, busiest) + vocabulary)
        split = max(busy, microbatches * (mean + vocabulary) + way(*least.forwards))
        whole = max(
            busy, microbatches * (mean + logits) + way(least.first, least.middle) + (ranks - 1) / 2 * work.hop
        )
        if work.placement.shape is Shape.LINEAR:
            whole = max(whole, ranks * mean / (1 - (1 - 1 / microbatches) ** ranks))
        around, together = work.update_seconds(self.state) + work.tied_seconds, work.together([part])
        return together * whole + around, together * split + around


def mean_rank(
    work: Workload, sums: ModelSums, fewest: Sequence[int], units: UnitWork | None = None
) -> MeanRank:
    """Return the mean rank of ``work``, whose stages have the ``fewest`` layers at least."""
    job, placement = work.job, work.placement
    total = sums.total(job, work.layers, placement.splits_head)
    part = total.times(1 / placement.ranks) + work.head_parameters
    return MeanRank(work, part, sums.least(job, fewest, placement.splits_head), units)


def busiest_rank(least: LeastSeconds, placement: Placement, layers: int) -> float:
    """Return a lower bound on the busiest rank's seconds of a microbatch, in any cut.

    Layers are dealt out one by one, each to the rank that has the least with it.  Each counts like the
    shortest, and the order of the layers does not count.
    """
    first, middle, last = (
        stage - few * least.layer for stage, few in zip(least[:3], least.fewest, strict=True)
    )
    ends = [first - middle, last - middle]
    if placement.folds:
        ends = [sum(ends)]
    middle_stages = placement.chunks * middle
    loads = Counter(middle_stages + more for more in ends)
    loads[middle_stages] += placement.ranks - len(ends)
    # Below the level that all would have if each began with the least, every layer is taken.
    level = min(loads) + layers * least.layer / placement.ranks
    certain = {load: max(0, int((level - load) / least.layer) - 1) for load in loads}
    # All other ways to deal a layer that may be taken, by what the rank then has; the last is the busiest's.
    most, rounds = max(loads), layers // placement.ranks + 2
    dealt = sorted(
        (load + number * least.layer, count)
        for load, count in loads.items()
        for number in range(certain[load] + 1, min(layers, rounds + int((most - load) / least.layer)) + 1)
    )
    before = sum(count * certain[load] for load, count in loads.items())
    totals = accumulate((count for _, count in dealt), initial=before)
    next(totals)
    return max(most, next(load for (load, _), count in zip(dealt, totals, strict=True) if count >= layers))


@lru_cache(maxsize=4096)
def _mean_messages(placement: Placement, microbatches: int) -> float:
    """Return the fewest message buffers of a rank on average."""
    return fmean(least_messages(placement, rank, microbatches) for rank in range(placement.ranks))


def least_memory(work: Workload, microbatches: int, margin: float, of_largest: bool = False) -> RankMemory:
    """Return a lower bound on the fullest rank's memory in any order.

    With ``of_largest`` a rank may keep the activations of its largest stage alone.
    """
    ranks = {id(part): rank for rank, part in enumerate(work.by_rank)}
    unlike = {*ranks.values(), work.head_rank}
    return max(
        (least_of_rank(work, rank, microbatches, margin, of_largest) for rank in unlike),
        key=lambda rank_bytes: rank_bytes.total,
    )


def least_of_rank(
    work: Workload, rank: int, microbatches: int, margin: float, of_largest: bool = False
) -> RankMemory:
    """Return a lower bound on the memory of a ``rank`` in any order; see ``least_memory``."""
    largest = max(work.parts[stage].after_forward for stage in work.placement.stages_of(rank))
    activations = _least_kept(work, work.by_rank[rank].after_forward, largest, of_largest)
    messages = least_messages(work.placement, rank, microbatches) / work.units
    loss = work.loss_bytes(rank, 1 / work.units)
    return memory_beside(work, work.states[rank], loss, activations, messages, margin)


def _least_kept(work: Workload, whole: float, largest: float, of_largest: bool) -> float:
    """Return the bytes of activations that a rank keeps at least.

    Its stages keep ``whole`` bytes of a microbatch together, and the ``largest`` stage so many.
    """
    shared = work.head.activation if work.head else 0.0
    return max(largest, shared) if of_largest else whole + shared


def least_memory_sharing(work: Workload, name: str, microbatches: int, margin: float) -> RankMemory:
    """Return a lower bound on the fullest rank's memory in the order of ``name`` with a split head.

    It puts the backwards of the schedule off, or of the one with a microbatch more, so that no rank keeps
    less of its stages than these do.  From two microbatches a rank on, more of them need no less.
    """
    placement = work.placement
    if microbatches < 2 * placement.ranks:
        return least_memory(work, microbatches, margin)
    plain = short_program(name, placement.ranks, 2 * placement.ranks, placement.chunks)
    return max(
        (
            rank_memory(work, rank, activations, least_messages(placement, rank, microbatches), margin)
            for rank, activations in enumerate(plain.in_flight.peaks(work.parts))
        ),
        key=lambda rank_bytes: rank_bytes.total,
    )
