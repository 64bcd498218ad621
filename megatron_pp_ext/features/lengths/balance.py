"""Documents into replicas and microbatches, so that all replicas take equally long for a step."""

from collections.abc import Sequence

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.features.lengths.length_costs import EQUAL_AT, LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.partition import partition
from megatron_pp_ext.schedule.costs import Costs

Balanced = list[list[list[int]]]
"""For each replica and each of its microbatches, the numbers of the documents in it."""


def balance(
    lengths: Sequence[int],
    replicas: int,
    microbatches: int | Sequence[int],
    *,
    most_tokens: int | None = None,
    equal_at: float = EQUAL_AT,
    schedule: str = "1f1b",
    ranks: int | None = None,
) -> Balanced:
    """Return which documents go into which microbatch of which data-parallel replica.

    ``lengths`` are those of all documents of a step in tokens, and every replica gets ``microbatches``
    microbatches.  A document costs ``tokens + tokens ** 2 / equal_at``: one of ``equal_at`` tokens takes as
    long for attention as for all else.  First the replicas get documents of nearly the same cost (Karmarkar
    and Karp), then the microbatches of each.  With ``most_tokens`` no microbatch has more; then documents go,
    the longest first, to the cheapest replica and microbatch that still hold them.

    ``microbatches`` may be several numbers.  Of these the one is taken whose step is shortest by simulation,
    with ``ranks`` pipeline ranks under ``schedule`` and microbatches ordered by its rule.  The time that a
    microbatch takes whatever its length is not counted, so give no more than are worth launching.

    Equal arguments give an equal result, so that each rank may compute it for itself.  Raises ValueError for
    fewer documents than microbatches, for documents that do not fit into ``most_tokens``, and for several
    numbers of microbatches without ``ranks``.
    """
    if isinstance(microbatches, int):
        return _balanced(lengths, replicas, microbatches, most_tokens, equal_at)
    if ranks is None or not microbatches:
        raise ValueError(
            "one of several numbers of microbatches is chosen by the pipeline: give the numbers, and ranks, "
            "its size"
        )
    found = [_balanced(lengths, replicas, count, most_tokens, equal_at) for count in microbatches]
    return min(found, key=lambda one: seconds_of(one, lengths, named(schedule, ranks, len(one[0])), equal_at))


def _balanced(
    lengths: Sequence[int], replicas: int, microbatches: int, most_tokens: int | None, equal_at: float
) -> Balanced:
    if replicas < 1 or microbatches < 1:
        raise ValueError(
            f"documents go to {replicas} replicas with {microbatches} microbatches, but there is one or more "
            "of each: correct it"
        )
    if len(lengths) < replicas * microbatches:
        raise ValueError(
            f"{len(lengths)} documents cannot fill {replicas} x {microbatches} microbatches: give more "
            "documents or fewer microbatches"
        )
    if min(lengths) < 1:
        raise ValueError(f"a document has {min(lengths)} tokens, but each has 1 or more: leave it out")
    costs = [length + length * length / equal_at for length in lengths]

    def of(places: Sequence[int]) -> list[float]:
        return [costs[place] for place in places]

    shares = partition(costs, replicas)
    if min(map(len, shares)) >= microbatches:
        found = [
            [[share[at] for at in part] for part in partition(of(share), microbatches)] for share in shares
        ]
    else:
        # One document is so long that its replica would have too few for its microbatches.
        parts = partition(costs, replicas * microbatches)
        sums = [sum(of(part)) for part in parts]
        found = [[parts[at] for at in group] for group in partition(sums, replicas, equal_sizes=True)]
    if most_tokens is None or _fits(found, lengths, most_tokens):
        return found
    return _within(lengths, costs, replicas, microbatches, most_tokens)


def _fits(found: Balanced, lengths: Sequence[int], most_tokens: int) -> bool:
    return all(sum(lengths[place] for place in part) <= most_tokens for share in found for part in share)


def _within(
    lengths: Sequence[int], costs: Sequence[float], replicas: int, microbatches: int, most_tokens: int
) -> Balanced:
    """Return the documents in microbatches of at most ``most_tokens``, the longest ones first."""
    found: Balanced = [[[] for _ in range(microbatches)] for _ in range(replicas)]
    tokens = [[0] * microbatches for _ in range(replicas)]
    work = [[0.0] * microbatches for _ in range(replicas)]
    left = len(lengths)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        cells = [
            (
                bool(found[replica][at]) and left <= _empty(found),
                sum(work[replica]),
                work[replica][at],
                replica,
                at,
            )
            for replica in range(replicas)
            for at in range(microbatches)
            if tokens[replica][at] + lengths[place] <= most_tokens
        ]
        if not cells:
            raise ValueError(
                f"documents of {sum(lengths):,} tokens, the longest with {max(lengths):,}, do not fit into "
                f"{replicas} x {microbatches} microbatches of {most_tokens:,} tokens: give more microbatches "
                "or a higher most_tokens"
            )
        *_, replica, at = min(cells)
        found[replica][at].append(place)
        tokens[replica][at] += lengths[place]
        work[replica][at] += costs[place]
        left -= 1
    return found


def _empty(found: Balanced) -> int:
    """Return how many microbatches have no document yet."""
    return sum(not part for share in found for part in share)


def seconds_of(
    found: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], request: Request, equal_at: float
) -> float:
    """Return how long the slowest replica takes by simulation, in any unit.

    ``found`` are the numbers of the documents in each microbatch of each replica, and ``request`` the
    schedule, by whose rule the microbatches are ordered.
    """
    from megatron_pp_ext.features.lengths.plan import Planner

    made = make(request).schedule
    planner, unit = Planner(made), Costs.per_rank(request.ranks, made.placement.chunks)
    costs = LengthCosts.with_attention(unit, 1, equal_at)
    steps = (Microbatches.of([lengths[place] for place in part] for part in share) for share in found)
    return max(planner.plan(costs.of(step), "rule").seconds for step in steps)
