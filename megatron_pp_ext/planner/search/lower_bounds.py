"""Lower bounds for a configuration in any order: the seconds of a step, and the bytes of a rank.

time    a rank does all its F, I and W, and all S and T of a split head, one after the other, the first
        microbatch has to reach it, and where backwards are whole, its last gradient has to travel back to
        the first stage.  Only a T may still follow that gradient.
memory  weights, gradients and optimizer state, one microbatch's activations of all of a rank's stages, as
        the backward of its first stage waits for the forward of its last, and the fewest messages.  If ranks
        split the head, a microbatch's S falls between the two.  Where a search tries variants
        (``variants``), those of one stage may be elsewhere while another runs, so that only the largest
        stage's count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import fmean

from megatron_pp_ext.compiler.limits import least_messages
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.state import ModelState, model_state
from megatron_pp_ext.planner.search.model_sums import LeastSeconds, ModelSums
from megatron_pp_ext.planner.step.estimate import RankMemory, memory_beside, rank_memory
from megatron_pp_ext.planner.step.programs import short_program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement, Shape

_BY_SLICES = 0.9
"""The part of the work of whole sequences that slices of them have at least.

Their products have lower rates, and attention adds up to that of the whole, but both are interpolated.
"""


def slices_of(work: Workload) -> float:
    """Return into how many slices each sequence is cut."""
    tokens = work.job.pipeline.pipeline_slice_tokens
    return max(1.0, work.job.model.seq_length / tokens) if isinstance(tokens, int) else 1.0


def bounds(work: Workload, microbatches: int) -> tuple[float, float]:
    """Return two lower bounds on a step in seconds: with whole backwards, and with split ones.

    In every placement stage r is the first one of rank r.  Where actions may run together, each takes its
    part of their time at least.
    """
    if slices_of(work) > 1:
        least = (
            _BY_SLICES
            * microbatches
            * max(
                rank_part.forward_seconds + rank_part.backward_seconds - rank_part.overlapped_in_whole
                for rank_part in work.by_rank
            )
        )
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

    ``least`` has lower bounds of the stages' seconds.
    """

    work: Workload
    part: Part
    least: LeastSeconds

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
        messages = _mean_messages(work.placement, microbatches) / slices_of(work)
        model, parts = work.model, work.placement.ranks * slices_of(work)
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
        if slices_of(work) > 1:
            sliced = _BY_SLICES * microbatches * mean
            return sliced, sliced
        logits, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
        ranks = work.placement.ranks
        vocabulary, least = logits + last, self.least
        busiest = busiest_rank(least, work.placement, len(work.model.layers))

        def way(first: float, middle: float) -> float:
            """Return the seconds of the stages before the mean rank's first one, with the messages."""
            return (ranks - 1) / ranks * (first + (ranks - 2) / 2 * middle) + (ranks - 1) / 2 * work.hop

        busy = microbatches * (max(mean, busiest) + vocabulary)
        split = max(busy, microbatches * (mean + vocabulary) + way(*least.forwards))
        whole = max(
            busy,
            microbatches * (mean + logits) + way(least.first, least.middle) + (ranks - 1) / 2 * work.hop,
        )
        if work.placement.shape is Shape.LINEAR:
            whole = max(whole, ranks * mean / (1 - (1 - 1 / microbatches) ** ranks))
        around, together = work.update_seconds(self.state) + work.tied_seconds, work.together([part])
        return together * whole + around, together * split + around


def mean_rank(work: Workload, sums: ModelSums, fewest: Sequence[int]) -> MeanRank:
    """Return the mean rank of ``work``, whose stages have the ``fewest`` layers at least."""
    job, placement = work.job, work.placement
    total = sums.total(job, work.layers, placement.splits_head)
    part = total.times(1 / placement.ranks) + work.head_parameters
    return MeanRank(work, part, sums.least(job, fewest, placement.splits_head))


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
    ranks_memory = []
    for rank in {*ranks.values(), work.head_rank}:
        largest = max(work.parts[stage].after_forward for stage in work.placement.stages_of(rank))
        activations = _least_kept(work, work.by_rank[rank].after_forward, largest, of_largest)
        messages = least_messages(work.placement, rank, microbatches) / slices_of(work)
        loss = work.loss_bytes(rank, 1 / slices_of(work))
        ranks_memory.append(memory_beside(work, work.states[rank], loss, activations, messages, margin))
    return max(ranks_memory, key=lambda rank_bytes: rank_bytes.total)


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
