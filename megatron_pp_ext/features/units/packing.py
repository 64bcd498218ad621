"""Documents into replicas and microbatches by cost, so that all replicas take equally long for a step."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as counter

from megatron_pp_ext.features.units.microbatches import MOST_DOCUMENTS, require_number, whole_number
from megatron_pp_ext.features.units.rates import EQUAL_AT, OVERHEAD

Part = tuple[float, int, list[int]]
"""The sum of a part, how many numbers it has, and their places."""

_DIFFERENCED = 6
"""For how many numbers of each part sets are put together, which takes time for each number and part."""


def partition(numbers: Sequence[float], parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Return the places of ``numbers`` in so many parts with nearly equal sums, none of which is empty.

    This is Karmarkar and Karp's largest differencing: the two sets of parts whose sums differ most are put
    together, the largest part of one with the smallest of the other, until one set is left ("The differencing
    method of set partitioning", 1982; for more than two parts Korf, Artificial Intelligence 106, 1998).
    Where there are many numbers, the smallest then fill up what the others have left uneven: each goes to the
    smallest part.  With very many parts all numbers do.

    Numbers are 0 or more.  With ``equal_sizes`` all parts have as many numbers.  Raises ValueError for fewer
    numbers than parts and, with ``equal_sizes``, for a number of them that ``parts`` does not divide.
    """
    parts = whole_number("parts", parts)
    for number in set(numbers):
        require_number("a number to divide", number)
    if not 0 < parts <= len(numbers):
        raise ValueError(
            f"{len(numbers)} numbers cannot fill {parts} parts: give more numbers or fewer parts"
        )
    if equal_sizes and len(numbers) % parts:
        raise ValueError(
            f"{len(numbers)} numbers are not the same number for each of {parts} parts: give a multiple"
        )
    falling = sorted(range(len(numbers)), key=lambda place: -numbers[place])
    size = parts if equal_sizes else 1
    largest = len(falling) if equal_sizes else _DIFFERENCED * parts
    if not equal_sizes and largest * parts > _MOST_PARTS:
        largest = 0
    falling, small = falling[:largest], falling[largest:]
    tie = counter()
    heap: list[tuple[float, int, list[Part]]] = []

    def add(division: list[Part]) -> None:
        division.sort(reverse=True)
        heapq.heappush(heap, (division[-1][0] - division[0][0], next(tie), division))

    for first in range(0, len(falling), size):
        group: list[Part] = [(numbers[place], 1, [place]) for place in falling[first : first + size]]
        add(group + [(0.0, 0, []) for _ in range(parts - len(group))])
    while len(heap) > 1:
        (_, _, widest), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(widest, reversed(other), strict=True)
        add([(a + b, n + m, some + more) for (a, n, some), (b, m, more) in pairs])
    division = heap[0][2] if heap else [(0.0, 0, []) for _ in range(parts)]
    heapq.heapify(division)
    for place in small:
        total, size, places = division[0]
        places.append(place)
        heapq.heapreplace(division, (total + numbers[place], size + 1, places))
    return [sorted(places) for *_, places in division]


_MOST_PARTS = 2_000_000
"""The most parts of sets that are put together; with more, all numbers go to the smallest part."""

Balanced = list[list[list[int]]]
"""For each replica and each of its microbatches, the numbers of the documents in it."""

_MOST_CELLS = 50_000_000
"""The most documents times microbatches where a microbatch is looked for that holds each document."""

_TIMED = 3
"""How many packings are timed for all replicas, the best of a rough comparison."""


def balance(
    lengths: Sequence[int],
    replicas: int,
    microbatches: int | Sequence[int],
    *,
    most_tokens: int | None = None,
    equal_at: float = EQUAL_AT,
    schedule: str = "1f1b",
    ranks: int | None = None,
    chunks: int | None = None,
    overhead: float = OVERHEAD,
    given: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Balanced:
    """Return which documents go into which microbatch of which data-parallel replica.

    ``lengths`` are those of all documents of a step in tokens, and every replica gets ``microbatches``
    microbatches.  A document costs ``tokens + tokens ** 2 / equal_at``: one of ``equal_at`` tokens takes as
    long for attention as for all else.  First the replicas get documents of nearly the same cost (Karmarkar
    and Karp), then the microbatches of each.  With ``most_tokens`` no microbatch has more; then documents go,
    the longest first, to the cheapest replica and microbatch that still hold them.

    ``microbatches`` may be several numbers.  Of those for which documents fit, the one is taken whose step is
    shortest by simulation, with ``ranks`` pipeline ranks and ``chunks`` a rank under ``schedule``, and
    microbatches ordered by its rule.  A microbatch costs ``overhead`` tokens on top of its own.

    ``given`` is a packing of the same form, for each replica and microbatch the numbers of its documents.  It
    is returned where no other is found whose simulated step is shorter, so that the result is never worse.

    Equal arguments give an equal result, so that each rank may compute it for itself.  Raises ValueError for
    fewer documents than microbatches, for documents that do not fit into ``most_tokens``, and for several
    numbers of microbatches, or ``given``, without ``ranks``.
    """
    several = isinstance(microbatches, Sequence) and not isinstance(microbatches, str)
    counts: tuple[int, ...] = tuple(microbatches) if isinstance(microbatches, Sequence) else (microbatches,)
    replicas = whole_number("replicas", replicas)
    counts = tuple(whole_number("microbatches", count) for count in counts)
    lengths = [whole_number("the length of a document", length) for length in lengths]
    if len(lengths) > MOST_DOCUMENTS:
        raise ValueError(f"there are {len(lengths):,} documents, at most {MOST_DOCUMENTS:,}: give one step")
    most_tokens = None if most_tokens is None else whole_number("most_tokens", most_tokens)
    require_number("equal_at", equal_at, "above 0")
    require_number("overhead", overhead)
    if ranks is not None:
        ranks = whole_number("ranks", ranks)
    if given is not None and sorted(place for share in given for part in share for place in part) != list(
        range(len(lengths))
    ):
        raise ValueError("given has not each document once: give their numbers, or leave it out")
    if not counts or (ranks is None and (several or given is not None)):
        raise ValueError(
            "packings are compared by the pipeline's simulated step: give the numbers of microbatches, and "
            "ranks, its size"
        )
    if ranks is None:
        return _balanced(lengths, replicas, counts[0], most_tokens, equal_at)
    # Imported here because it takes numpy, which nobody needs who gives one number.
    from megatron_pp_ext.features.units.comparison import PackedSteps

    steps = PackedSteps(lengths, schedule, ranks, chunks, equal_at, overhead)
    packings, refused = list[tuple[float, Balanced]](), list[ValueError]()
    for count in counts:
        try:
            packing = _balanced(lengths, replicas, count, most_tokens, equal_at)
            packings.append((steps.roughly(packing), packing))
        except ValueError as error:
            refused.append(error)
    packings.sort(key=lambda entry: entry[0])
    best = [packing for _, packing in packings[:_TIMED]]
    if given is not None:
        # The first of the shortest is taken.
        best.insert(0, [[list(part) for part in share] for share in given])
    if not best:
        raise refused[0]
    return min(best, key=steps.seconds) if len(best) > 1 else best[0]


def _balanced(
    lengths: Sequence[int], replicas: int, microbatches: int, most_tokens: int | None, equal_at: float
) -> Balanced:
    if len(lengths) < replicas * microbatches:
        raise ValueError(
            f"{len(lengths)} documents cannot fill {replicas} x {microbatches} microbatches: give more "
            "documents or fewer microbatches"
        )
    costs = [length + length * length / equal_at for length in lengths]

    def of(places: Sequence[int]) -> list[float]:
        return [costs[place] for place in places]

    shares = _shares(tuple(costs), replicas)
    if min(map(len, shares)) >= microbatches:
        packing = [
            [[share[at] for at in part] for part in partition(of(share), microbatches)] for share in shares
        ]
    else:
        # One document is so long that its replica would have too few for its microbatches.
        parts = partition(costs, replicas * microbatches)
        sums = [sum(of(part)) for part in parts]
        packing = [[parts[at] for at in group] for group in partition(sums, replicas, equal_sizes=True)]
    if most_tokens is None or all(
        sum(lengths[place] for place in part) <= most_tokens for share in packing for part in share
    ):
        return packing
    return _within(lengths, costs, replicas, microbatches, most_tokens)


@lru_cache(maxsize=1)
def _shares(costs: tuple[float, ...], replicas: int) -> list[list[int]]:
    """Return the documents of each replica, which are the same for any number of microbatches."""
    return partition(costs, replicas)


def _within(
    lengths: Sequence[int], costs: Sequence[float], replicas: int, microbatches: int, most_tokens: int
) -> Balanced:
    """Return the documents in microbatches of at most ``most_tokens``, the longest ones first."""
    if len(lengths) * replicas * microbatches > _MOST_CELLS:
        raise ValueError(
            f"{len(lengths):,} documents for {replicas} x {microbatches} microbatches of at most "
            f"{most_tokens:,} tokens take minutes to fit: give a higher most_tokens, or one step"
        )
    packing: Balanced = [[[] for _ in range(microbatches)] for _ in range(replicas)]
    tokens = [[0] * microbatches for _ in range(replicas)]
    work = [[0.0] * microbatches for _ in range(replicas)]
    remaining = len(lengths)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        fills_empty = remaining <= sum(not part for share in packing for part in share)
        cells = [
            (fills_empty and bool(packing[replica][at]), sum(work[replica]), work[replica][at], replica, at)
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
        packing[replica][at].append(place)
        tokens[replica][at] += lengths[place]
        work[replica][at] += costs[place]
        remaining -= 1
    return packing


Groups = list[list[list[int]]]
"""For each microbatch and each data- and context-parallel rank, the numbers of the documents in it."""

_PARTS = 0.67, 1.0, 1.25, 1.5, 2.0, 3.0
"""The numbers of microbatches that are tried, as parts of Megatron's."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents are packed: under ``schedule`` with so many pipeline ``ranks`` and chunks a rank.

    A document of ``equal_at`` tokens takes as long for attention as for all else, and a microbatch costs
    ``overhead`` tokens on top of its own.  A microbatch has at most ``most_tokens`` tokens, and
    ``most_documents`` documents where that is not None.  Their number is a ``multiple`` of one that Megatron
    requires.
    """

    schedule: str
    ranks: int
    chunks: int | None
    most_tokens: int
    most_documents: int | None = None
    equal_at: float = EQUAL_AT
    overhead: float = OVERHEAD
    multiple: int = 1

    def balanced(self, groups: Groups, lengths: Sequence[int], replicas: int) -> Groups:
        """Return the same documents in the microbatches of the shortest step, balanced over replicas by cost.

        ``groups`` are Megatron's, in which each replica has as many ranks next to each other, all with
        the same documents.  They stay where no other step is shorter by simulation, each replica with its
        microbatches ordered by the rule of the schedule, and where documents do not fit.
        """
        copies = len(groups[0]) // replicas
        before = [[group[replica * copies] for group in groups] for replica in range(replicas)]
        try:
            after = balance(
                lengths,
                replicas,
                self.counts(len(groups), len(lengths) // replicas),
                most_tokens=self.most_tokens,
                equal_at=self.equal_at,
                schedule=self.schedule,
                ranks=self.ranks,
                chunks=self.chunks,
                overhead=self.overhead,
                given=before,
            )
        except ValueError:  # the schedule cannot run as many microbatches as Megatron has
            return groups
        most = self.most_documents
        if after == before or (most is not None and any(len(part) > most for row in after for part in row)):
            return groups
        return [
            [list(row[number]) for row in after for _ in range(copies)] for number in range(len(after[0]))
        ]

    def counts(self, microbatches: int, documents: int) -> list[int]:
        """Return the numbers of microbatches to try, where Megatron has ``microbatches``.

        None is above the number of ``documents`` of a replica.
        """
        multiple = self.multiple
        tried = (max(1, round(part * microbatches / multiple)) * multiple for part in _PARTS)
        return sorted({count for count in tried if count <= documents} | {microbatches})
