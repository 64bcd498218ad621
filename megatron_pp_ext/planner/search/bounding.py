"""The candidates of a search that may fit, each with lower bounds on its step and its memory.

What a search may choose is left to later rounds (``rounds``), so that the first looks at exactly what a
search without any choice does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from megatron_pp_ext.planner.search import variants
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory
from megatron_pp_ext.planner.search.result import Bounded, SearchResult
from megatron_pp_ext.planner.search.workloads import Workloads
from megatron_pp_ext.planner.step.estimate import RankMemory
from megatron_pp_ext.planner.step.programs import placement_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Round:
    """Candidates that are looked at together: all of ``space`` that are not in ``before``.

    ``choices`` are the arguments whose values the search chooses in them.  A round that ``is_varied`` has
    candidates that fit in a variant alone.
    """

    space: Space
    before: Space | None = None
    choices: tuple[str, ...] = ()
    is_varied: bool = False

    @property
    def is_first(self) -> bool:
        """Whether nothing is left to the search in it."""
        return not self.choices


def rounds(space: Space) -> list[Round]:
    """Return the rounds of a search of ``space``: without choices, with flags' choices, with variants."""
    of_variants = tuple(name for variant in variants.tried(space.job) for name in variant.arguments)
    plain, choices = space.without_choices()
    planned = [Round(plain)]
    if choices:
        planned.append(Round(space, plain, choices))
    if of_variants:
        planned.append(Round(space, None, of_variants, is_varied=True))
    return planned


@dataclass(frozen=True, slots=True)
class _Least:
    """The least bytes of a candidate's fullest rank, and the least seconds of its step.

    ``memory`` takes whether a rank may keep its largest stage alone.  ``seconds`` are with whole and with
    split backwards.
    """

    memory: Callable[[bool], RankMemory]
    seconds: Callable[[], tuple[float, float]]


class Bounding:
    """Bounds candidates for ``limit`` bytes a GPU, and counts them in ``result``."""

    def __init__(self, workloads: Workloads, limit: float, margin: float, result: SearchResult) -> None:
        self._workloads, self._limit, self._margin = workloads, limit, margin
        self._result = result
        self.smallest: tuple[Candidate, RankMemory] | None = None

    def of_round(self, search_round: Round) -> Iterator[tuple[int, int, Iterator[Bounded]]]:
        """Yield the number of each cut, the number of all, and an iterator of its candidates that may fit."""
        cuts, before = (
            list(search_round.space.cuts()),
            set(search_round.before.cuts() if search_round.before else ()),
        )
        for number, cut in enumerate(cuts):
            yield number, len(cuts), self._of_cut(search_round, cut, cut in before)

    def _of_cut(self, search_round: Round, cut: Candidate, is_before: bool) -> Iterator[Bounded]:
        space = search_round.space
        shares = set(space.sharing(cut))
        if search_round.before and is_before:
            shares -= set(search_round.before.sharing(cut))
        for chunks, names in space.orders(cut) if shares else ():
            for recompute in space.recomputes(cut, chunks):
                chunked = space.described(replace(cut, recompute=recompute, chunks=chunks))
                yield from self._sizes(search_round, chunked, names, sorted(shares))

    def _sizes(
        self, search_round: Round, cut: Candidate, names: Sequence[str], shares: Sequence[bool]
    ) -> Iterator[Bounded]:
        """Yield ``cut`` with all microbatches and schedules that may fit, with their bounds.

        The smallest microbatch comes first, and larger ones only need more memory.
        """
        is_full, result = False, self._result
        placements: dict[Placement, list[str]] = {}
        for splits_head, name in product(shares, names):
            placement = placement_of(name, cut.pipeline, cut.chunks, splits_head)
            placements.setdefault(placement, []).append(name)
        legal = sum(map(len, placements.values()))
        for sized in search_round.space.refined(cut):
            if not search_round.is_varied:
                result.legal += legal
                result.unfit += legal
            if is_full:
                continue
            is_full = True
            for placement, placed in placements.items():
                if sized.splits_head != placement.splits_head:
                    sized = replace(sized, splits_head=placement.splits_head)
                least = self._least(sized, placement, search_round.space.is_uneven)
                fullest = least.memory(search_round.is_varied)
                if fullest.total > self._limit:
                    if self.smallest is None or fullest.total < self.smallest[1].total:
                        self.smallest = replace(sized, schedule=placed[0]), fullest
                    continue
                is_full = False
                if search_round.is_varied and least.memory(False).total <= self._limit:
                    continue
                result.unfit -= len(placed)
                whole, split = least.seconds()
                for name in placed:
                    bound = split if catalog.abilities(name).splits_backward else whole
                    yield Bounded(bound, fullest.total, sized, name)

    def _least(self, candidate: Candidate, placement: Placement, is_uneven: bool) -> _Least:
        microbatches = candidate.microbatches
        if is_uneven and placement.ranks > 1:
            mean = self._workloads.mean(candidate, placement)
            memory = partial(mean.memory, microbatches, self._margin, None)
            return _Least(memory, partial(mean.bounds, microbatches))
        work = self._workloads.work(candidate, placement)
        return _Least(
            partial(least_memory, work, microbatches, self._margin), partial(bounds, work, microbatches)
        )
