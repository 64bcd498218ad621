"""The choice of activations to offload, and of when they are reloaded (arXiv 2503.01328, section 3).

The order of a schedule stays as it is, and so do its times where copies fit into the time for which
activations wait for their backward: no plan here makes a step longer.  Each rank chooses for itself
(``rank_copies``).  For a memory limit a rank offloads as little as keeps it.  ``longer_plans`` has what
asks for more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_pp_ext.features.offload.rank_copies import ROUNDING, PlannedCopy, RankCopies
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.copies import Copies
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate


def share_offloaded(timeline: Timeline) -> float:
    """Return the part of all activations of a step that are copied to the host."""
    amounts = [stage.activation for stage in timeline.costs.stages]
    offloaded = sum(amounts[stage] for stage, _ in timeline.schedule.copies.reloads)
    return offloaded / (timeline.schedule.microbatches * sum(amounts))


def with_share(schedule: Schedule, costs: Costs, share: float) -> Timeline:
    """Return ``schedule`` with this ``share`` of its activations on the host, or with less, simulated.

    What stays although it is asked for would make its backward wait.  Each rank offloads the same share, but
    where one has not enough that can be, the others offload more.  ValueError for a share that is not above 0
    and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of activations on the host is {share:g}: give one above 0, at most 1")
    alone = without_copies(schedule, costs)
    ranks = [RankCopies(alone, rank) for rank in range(len(alone.events))]
    capacities = [len(rank.copies(len(rank.waits))) for rank in ranks]
    counts = balanced(capacities, round(share * sum(len(rank.waits) for rank in ranks)))
    return timed(alone, [rank.copies(count) for rank, count in zip(ranks, counts, strict=True)])


def within(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Timeline:
    """Return ``schedule`` with as few copies as keep each rank within its limit, simulated.

    A rank that no copies keep within it, by ``over``, offloads all that can be.  ``limits`` are in the
    unit of ``StageCosts.activation``, and are held against ``Timeline.peak_memory``.
    """
    alone = without_copies(schedule, costs)
    return timed(alone, least_copies(alone, limits)[0])


def least_copies(step: Timeline, limits: Sequence[float]) -> tuple[list[list[PlannedCopy]], list[int]]:
    """Return as few copies as keep each rank of ``step`` within its limit, and the ranks that none keep."""
    copies, above = [], []
    for rank, limit in enumerate(without_messages(step, limits)):
        plan = RankCopies(step, rank)
        copies.append(plan.least(limit))
        if plan.peak(copies[rank]) > limit * (1 + ROUNDING):
            above.append(rank)
    return copies, above


def without_messages(timeline: Timeline, limits: Sequence[float]) -> list[float]:
    """Return the memory limits of ranks less their messages."""
    message = timeline.costs.message
    counts = timeline.peak_messages if message else (0,) * len(limits)
    return [limit - message * count for limit, count in zip(limits, counts, strict=True)]


def over(timeline: Timeline, limits: Sequence[float]) -> float:
    """Return by how much the fullest rank exceeds its limit; 0 where all keep theirs."""
    above = (peak - limit * (1 + ROUNDING) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    return max(0.0, *above)


def balanced(capacities: Sequence[int], total: int) -> list[int]:
    """Return ``total`` in equal parts, none above its capacity; the first have one more where it is odd."""
    level = 0
    while sum(min(capacity, level + 1) for capacity in capacities) <= min(total, sum(capacities) - 1):
        level += 1
    remaining = total - sum(min(capacity, level) for capacity in capacities)
    higher = [at for at, capacity in enumerate(capacities) if capacity > level][:remaining]
    return [min(capacity, level) + (at in higher) for at, capacity in enumerate(capacities)]


def without_copies(schedule: Schedule, costs: Costs) -> Timeline:
    """Return ``schedule`` with all activations on the device, simulated."""
    return simulate(replace(schedule, copies=Copies()), costs)


def timed(step: Timeline, copies: Iterable[Iterable[PlannedCopy]]) -> Timeline:
    """Return ``step`` with these ``copies`` of its ranks and no others, simulated."""
    planned = [copy for rank in copies for copy in rank]
    reloads = {copy.times[:2]: copy.reloaded_before for copy in planned}
    frees = {copy.times[:2]: copy.freed_before for copy in planned}
    return simulate(replace(step.schedule, copies=Copies(reloads, frees)), step.costs)
