"""What a configuration needs at least, whatever the order: no step is shorter, and no rank keeps less.

time    a rank does all its F, I and W, and all S and T of a shared vocabulary, one after the other, the first
        microbatch has to reach it, and where backwards are whole, its last gradient has to travel back to
        the first stage.  Only a T may still follow that gradient.
memory  weights, gradients and optimizer state, one microbatch's activations of all of a rank's stages, as
        the backward of its first stage waits for the forward of its last, and the fewest messages.  If ranks
        share the vocabulary, a microbatch's S falls between the two.
"""

from megatron_pp_ext.compiler.limits import least_messages
from megatron_pp_ext.planner.step.estimate import RankMemory, rank_memory
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.planner.step.workload import Workload


def bounds(work: Workload, microbatches: int) -> tuple[float, float]:
    """Return two lower bounds on a step in seconds: with whole backwards, and with split ones.

    In every placement stage r is the first one of rank r.
    """
    shared = work.costs.vocabulary
    scores, last = (shared.scores, shared.weight_gradient) if shared else (0.0, 0.0)
    hop, head, tail, whole, split = work.costs.hop, 0.0, 0.0, 0.0, 0.0
    for stage, own in zip(work.costs.stages, work.by_rank, strict=False):
        seconds = own.forward_seconds + own.input_gradient_seconds + own.weight_gradient_seconds
        backwards_end = head + microbatches * (seconds + scores)
        busy = backwards_end + microbatches * last
        split, whole = max(split, busy), max(whole, busy, backwards_end + tail)
        head += stage.forward + hop
        tail += stage.input_gradient + stage.weight_gradient + hop
    around = max(wait.update for wait in work.waits) + work.tied_seconds
    return whole + around, split + around


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
    plain = program(name, placement.ranks, 2 * placement.ranks, placement.chunks)
    return max(
        (
            rank_memory(work, rank, kept, least_messages(placement, rank, microbatches), margin)
            for rank, kept in enumerate(plain.in_flight.peaks(work.parts))
        ),
        key=lambda one: one.total,
    )
