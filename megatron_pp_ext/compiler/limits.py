"""What a rank may keep: what a limit on its memory means, and the least that any order keeps to.

Activations count, and messages where ``Costs.message`` says what one takes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.search.problem import TOLERANCE
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement

LARGEST_FRACTION = 8.0
"""A larger limit is an amount of memory."""


def asked_for(limit: float, ranks: int, microbatches: int, costs: Costs) -> tuple[float, Costs]:
    """A user's ``limit`` as an amount of memory for every rank, and the costs that it counts.

    Up to ``LARGEST_FRACTION`` it is a fraction of the activations that 1F1B keeps on its first rank, those
    of ``ranks`` microbatches or of all ``microbatches``.  It limits activations alone, as in the papers:
    messages come on top of it.  A larger one is in the unit of ``StageCosts.activation`` and holds both.
    """
    if not 0 < limit <= LARGEST_FRACTION:
        return limit, costs
    whole = min(ranks, microbatches) * costs.merged(ranks).stages[0].activation
    return limit * whole, replace(costs, message=0.0)


def least_limits(
    ranks: int, costs: Costs, placement: Placement, microbatches: int = SENDS_AHEAD + 1
) -> tuple[float, ...]:
    """What each rank must be able to keep, in the unit of ``StageCosts.activation``.

    This is one microbatch's activations of all its stages: the backward of a rank's first stage waits for
    the forward of its last.  Beside them come ``least_messages``, of which there are no more with more than
    the default ``microbatches``.  There is no way to keep less, and one microbatch at a time needs no more.
    """
    cut = cut_for(placement, ranks, costs)
    return tuple(
        math.fsum(cut.stages[stage].activation for stage in placement.stages_of(rank))
        + least_messages(placement, rank, microbatches) * cut.message
        for rank in range(ranks)
    )


def least_messages(placement: Placement, rank: int, microbatches: int) -> int:
    """The message buffers that ``rank`` holds at least (``messages.most_buffers``), whatever the order.

    These are sent messages that may be unfinished, and the one that an action takes.
    """
    edges = (
        edge
        for stage in placement.stages_of(rank)
        for edge in range(max(0, stage - 1), min(stage + 1, placement.stages - 1))
    )
    # Edge n joins the stages n and n + 1.  A stage sends a message of each microbatch over each of its edges.
    each = sum(not placement.is_local(edge) for edge in edges)
    return min(microbatches * each, SENDS_AHEAD + 1) + (each > 0)


def rooms_beside_messages(
    placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]
) -> tuple[float, ...]:
    """What every rank's limit leaves to activations, in any order; all of it where a rank keeps none."""
    needed = least_limits(placement.ranks, replace(costs, message=0.0), placement)
    return tuple(
        limit - least_messages(placement, rank, microbatches) * costs.message if least else limit
        for rank, (limit, least) in enumerate(zip(limits, needed, strict=True))
    )


def at_most(amount: float, limit: float) -> bool:
    """Whether ``limit`` holds ``amount``, up to rounding."""
    return amount <= limit * (1 + 2 * TOLERANCE)


def cut_for(placement: Placement, ranks: int, costs: Costs) -> Costs:
    """``costs`` for the stages of ``placement``; ValueError where that is for another number of ranks."""
    if placement.ranks != ranks:
        raise ValueError(f"{placement} is for {placement.ranks} ranks, not {ranks}: correct one of them")
    return costs.merged(placement.stages)
