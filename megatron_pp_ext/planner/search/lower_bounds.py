"""What a configuration needs at least, whatever the order: no step is shorter, and no rank keeps less.

time    a rank does all its F, I and W, and all S and T of a shared vocabulary, one after the other, the first
        microbatch has to reach it, and where backwards are whole, its last gradient has to travel back to
        the first stage.  Only a T may still follow that gradient.
memory  weights, gradients and optimizer state, one microbatch's activations of all of a rank's stages, as
        the backward of its first stage waits for the forward of its last, and the fewest messages.  If ranks
        share the vocabulary, a microbatch's S falls between the two.
"""

from dataclasses import fields
from statistics import fmean

from megatron_pp_ext.compiler.limits import least_messages
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.search.array_program import array_program
from megatron_pp_ext.planner.step.estimate import RankMemory, rank_memory
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.placement import Shape


def bounds(work: Workload, microbatches: int) -> tuple[float, float]:
    """Return two lower bounds on a step in seconds: with whole backwards, and with split ones.

    In every placement stage r is the first one of rank r.  Where actions may run in pairs, each takes its
    part of the pair's time at least.
    """
    shared = work.costs.vocabulary
    scores, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
    hop, head, tail, whole, split = work.costs.hop, 0.0, 0.0, 0.0, 0.0
    for stage, own in zip(work.costs.stages, work.by_rank, strict=False):
        seconds = own.forward_seconds + own.input_gradient_seconds + own.weight_gradient_seconds
        busy = head + microbatches * (seconds + scores + last)
        hidden = microbatches * own.hidden_in_whole
        split, whole = max(split, busy), max(whole, busy - hidden, busy - hidden - microbatches * last + tail)
        head += stage.forward + hop
        tail += stage.input_gradient + stage.weight_gradient + hop
    around = max(wait.update for wait in work.waits) + work.tied_seconds
    pair = work.costs.pair
    return pair * whole + around, pair * split + around


def bounds_of_any_cut(work: Workload, stages: ModelStages, microbatches: int) -> tuple[float, float]:
    """Return the same two lower bounds for whatever cut of the layers into ``stages``; ``work`` has one.

    Every cut has the same work in all, T a microbatch, and its busiest rank at least ``busiest_rank``.  With
    whole backwards rank r starts after the forwards of r stages, and ends before their backwards: for the
    mean rank these are half of all ranks' shortest stages.  On one stage a rank, with t_r a microbatch, the
    step Z is at least m t_r + t_0 + ... + t_(r-1) for every r, which adds up to T <= Z (1 - (1 - 1/m)^p).
    """
    shared, ranks, waits = work.costs.vocabulary, work.placement.ranks, work.waits
    each, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
    own = [part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
           for part in work.by_rank]  # fmt: skip
    mean = sum(own) / ranks
    shortest = mean - sum(part.hidden_in_whole for part in work.by_rank) / ranks
    busiest, others = stages.busiest_rank(), each + last
    split = microbatches * (max(mean, busiest) + others)
    if work.placement.shape is Shape.LINEAR:
        whole = ranks * shortest / (1 - (1 - 1 / microbatches) ** ranks)
    else:
        whole = microbatches * shortest + (ranks - 1) / 2 * stages.shortest_stage()
    around = sum(wait.update for wait in waits) / ranks + work.tied_seconds
    whole = max(whole, microbatches * (max(shortest, busiest) + others))
    pair = work.costs.pair
    return pair * whole + around, pair * split + around


def mean_memory(
    work: Workload, microbatches: int, margin: float, order: Prepared | None = None
) -> RankMemory:
    """Return what a rank needs on average: in any order, where under no cut the fullest one needs less.

    With ``order`` it is what a rank needs in that order at least.
    """
    shared, ranks = work.costs.vocabulary, range(work.placement.ranks)
    each = shared.activation if shared else 0.0
    kept = (
        order.in_flight.peaks(work.parts, each)
        if order
        else [work.by_rank[rank].after_forward + each for rank in ranks]
    )
    found = [
        rank_memory(work, rank, kept[rank], least_messages(work.placement, rank, microbatches), margin)
        for rank in ranks
    ]
    return RankMemory(*(fmean(getattr(one, field.name) for one in found) for field in fields(RankMemory)))


def least_memory(work: Workload, microbatches: int, margin: float) -> RankMemory:
    """Return what the fullest rank needs in any order."""
    ranks = {id(part): rank for rank, part in enumerate(work.by_rank)}
    shared = work.costs.vocabulary.activation if work.costs.vocabulary else 0.0
    found = []
    for rank in {*ranks.values(), work.head_rank}:
        activations = work.by_rank[rank].after_forward + shared
        messages = least_messages(work.placement, rank, microbatches)
        found.append(rank_memory(work, rank, activations, messages, margin))
    return max(found, key=lambda one: one.total)


def least_memory_sharing(work: Workload, name: str, microbatches: int, margin: float) -> RankMemory:
    """Return what the fullest rank needs in the order that ``schedule.vocabulary.share`` makes of ``name``.

    It puts the backwards of the schedule off, or of the one with a microbatch more, so that no rank keeps
    less of its stages than these do.  From two microbatches a rank on, more of them need no less.
    """
    placement = work.placement
    if microbatches < 2 * placement.ranks:
        return least_memory(work, microbatches, margin)
    plain = array_program(name, placement.ranks, 2 * placement.ranks, placement.chunks)
    return max(
        (
            rank_memory(work, rank, kept, least_messages(placement, rank, microbatches), margin)
            for rank, kept in enumerate(plain.in_flight.peaks(work.parts))
        ),
        key=lambda one: one.total,
    )
