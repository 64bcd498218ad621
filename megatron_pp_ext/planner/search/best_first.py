"""The search for the configuration with the shortest step among all that are legal and fit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.planner.search import candidate as variants
from megatron_pp_ext.planner.search.candidate import Candidate, tried
from megatron_pp_ext.planner.search.compiled import Compiler, to_compile
from megatron_pp_ext.planner.search.configurations import Space, reason
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory
from megatron_pp_ext.planner.search.replays import Evaluated, Replays, Workloads
from megatron_pp_ext.planner.search.result import (
    ALIKE,
    LEVELS,
    Bounded,
    Compiles,
    SearchBudget,
    SearchResult,
    Stopped,
)
from megatron_pp_ext.planner.step.estimate import MARGIN, RankMemory
from megatron_pp_ext.planner.step.programs import placement_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.loops import without_collection
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
    """Return the rounds of a search of ``space``: without choices, with flags' choices, with variants.

    Choices are left to later rounds, so that the first looks at exactly what a search without any choice
    does.
    """
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
            partial(least_memory, work, microbatches, self._margin),
            partial(bounds, work, microbatches, self._workloads.units(candidate)),
        )


_SPENT = "stopped after the {:g} s of a processor that --cpu-seconds allows"
INTERRUPTED = "interrupted"


Progress = Callable[[str, int, int], None]
"""A callback that is given the current phase, how much of it is done, and how much there is."""


class Search:
    """A search of ``space`` for ``system``, of which ``limit`` bytes a GPU may be used, within ``budget``.

    Every candidate gets a lower bound on its step.  The candidates are replayed action by action in the order
    of their bounds, and the search ends when no remaining bound is below the step of the last of the best: no
    other candidate can be among them.  A candidate that fits in no order gets no bound at all.  A search
    whose budget is spent, or that is interrupted, ends with the best that it has.
    """

    def __init__(
        self,
        space: Space,
        system: System,
        limit: float,
        margin: float = MARGIN,
        top: int = 10,
        compiles: Compiles = Compiles.NEVER,
        budget: SearchBudget | None = None,
    ) -> None:
        self._space, self._compiles = space, compiles
        self.budget = budget or SearchBudget()
        self._limit, self._margin, self._top = limit, margin, top
        self.result = SearchResult()
        self._workloads = Workloads(space.job, system.at_scale(space.gpus))
        self._bounding = Bounding(self._workloads, limit, margin, self.result)
        self._replays = Replays(self._workloads, margin, space.is_uneven, tried(space.job))
        self._shortest: dict[float, Evaluated] = {}
        self._alike: dict[Candidate, list[Evaluated]] = {}
        self._tried: set[Candidate] = set()
        self._timed = Counter[Candidate]()

    def run(self, progress: Progress = lambda what, done, total: None) -> SearchResult:
        """Search; ValueError where nothing is legal, nothing fits, or nothing was found within the budget.

        KeyboardInterrupt where there is no result yet.
        """
        gpus, per_node = self._space.gpus, self._space.gpus_per_node
        if gpus > per_node and gpus % per_node:
            below = gpus // per_node * per_node
            raise ValueError(
                f"--gpus {gpus} leaves a node of {per_node} GPUs in part: nearest that work are {below} and "
                f"{below + per_node}"
            )
        self._look(progress)
        if not self.result.legal:
            raise ValueError(reason(self._space))
        self._compile(progress)
        if not self.result.best:
            raise ValueError(self._nothing_fits())
        for_less_memory = set(self._shortest.values())
        self.result.for_less_memory = sorted(for_less_memory, key=lambda row: row.bytes)
        return self.result

    def _look(self, progress: Progress) -> None:
        """Look at the candidates of one round after the other.

        The first has none of the user's ``auto``, and orders are compiled for its best at once.  So a search
        never ends with less than the same one without these flags.
        """
        kept_out, remaining = list[Bounded](), rounds(self._space)
        try:
            while remaining and not self.result.stopped:
                current = remaining[0]
                with without_collection():
                    bounded = self._bounded(current, progress)
                    if self.result.stopped:
                        break
                    remaining.pop(0)
                    if current.is_varied:
                        bounded, kept_out = [*bounded, *kept_out], []
                    bounded.sort(key=lambda other: other.bound)
                    kept_out += self._in_order(
                        bounded, self._varied if current.is_varied else self._replayed, progress
                    )
                if remaining and self._compiles is Compiles.TOO:
                    self._compile(progress)
        except KeyboardInterrupt:
            self._stop(INTERRUPTED, ())
            if not self.result.best:
                raise
        if remaining and self.result.stopped:
            untried = tuple(name for untried_round in remaining for name in untried_round.choices)
            self.result.stopped = replace(self.result.stopped, untried=untried)

    def _bounded(self, current: Round, progress: Progress) -> list[Bounded]:
        """Return the candidates of a round that may fit.

        Only later rounds than the first may end early: a search without a result lacks time.
        """
        candidates = list[Bounded]()
        for number, total, of_cut in self._bounding.of_round(current):
            progress("bounding", number, total)
            if not current.is_first and self._is_spent:
                self._stop(_SPENT.format(self.budget.seconds), ())
                break
            candidates += of_cut
        return candidates

    @property
    def _is_spent(self) -> bool:
        return self.budget.is_spent(self._compiles is not Compiles.NEVER, bool(self.result.best))

    def _in_order(
        self,
        bounded: Sequence[Bounded],
        replay: Callable[[Candidate, float], Evaluated | RankMemory | None],
        progress: Progress,
    ) -> list[Bounded]:
        """Replay candidates in order, and return those for which ``replay`` reports too much memory."""
        number, kept_out = 0, list[Bounded]()
        try:
            for number, entry in enumerate(bounded):
                progress("replaying", number, len(bounded))
                if not self._headroom(entry.bound):
                    break
                if self._is_spent:
                    self._stop(_SPENT.format(self.budget.seconds), bounded[number:])
                    break
                candidate = entry.candidate
                headroom = self._headroom(entry.bound, candidate)
                if entry.least > headroom:
                    continue
                if candidate.planned is not None and self._is_left_out(candidate):
                    continue
                outcome = replay(candidate, headroom)
                if isinstance(outcome, Evaluated):
                    self.result.replayed += 1
                    if candidate.planned is not None:
                        self._timed[candidate.unplanned] += 1
                    self._offer(outcome)
                elif outcome is not None:
                    kept_out.append(entry)
            progress("replaying", len(bounded), len(bounded))
        except KeyboardInterrupt:
            self._stop(INTERRUPTED, bounded[number:])
            if not self.result.best:
                raise
        return kept_out

    def _is_left_out(self, candidate: Candidate) -> bool:
        """Whether as many with the option of ``candidate`` have been timed as may be; it is counted then."""
        assert candidate.planned is not None
        choosing = variants.of_option(candidate.planned)
        is_left_out = self._timed[candidate.unplanned] == choosing.most
        if is_left_out:
            self.result.left_out[choosing.beyond] += 1
        return is_left_out

    def _stop(self, why: str, untried: Sequence[Bounded]) -> None:
        """Note ``why`` the search ends, and which candidates are ``untried``."""
        least = min((entry.bound for entry in untried), default=0.0)
        self.result.stopped = self.result.stopped or Stopped(why, len(untried), least)

    def _headroom(self, bound: float, candidate: Candidate | None = None) -> float:
        """Return the most memory in which a step of ``bound`` seconds would still be among the results.

        It is 0 where such a step is neither among the best, or nearly the same as one of them but the last,
        nor on the frontier.  Without a ``candidate`` it may be of any sizes.
        """
        best = self.result.best
        longest = best[-1].seconds if len(best) == self._top else inf
        if candidate is None and len(best) == self._top > 1:
            longest = max(longest, best[-2].seconds * (1 + ALIKE))
        group = self._alike.get(candidate.apart_from_schedule) if candidate else None
        if group:
            # What is nearly as fast as one of the best is shown after it, however slow the last is.
            alike = group[0].seconds * (1 + ALIKE)
            longest = alike if group[0].seconds <= longest else min(longest, alike)
        if bound < longest:
            return self._limit
        levels = [level for level in LEVELS if level not in self._shortest]
        levels += [level for level, step in self._shortest.items() if bound < step.estimate.step_seconds]
        return max(levels, default=0.0) * self._limit

    def _offer(self, evaluated: Evaluated) -> None:
        sizes = evaluated.candidate.apart_from_schedule
        alike = sorted([*self._alike.get(sizes, []), evaluated], key=lambda row: row.seconds)
        self._alike[sizes] = [member for member in alike if member.seconds <= alike[0].seconds * (1 + ALIKE)]
        ranked = sorted(self._alike.values(), key=lambda group: group[0].seconds)[: self._top]
        self.result.best = [first for first, *_ in ranked]
        self.result.alike = {first.candidate: slower for first, *slower in ranked}
        self.result.add_to_frontier(evaluated)
        for level in LEVELS:
            other = self._shortest.get(level)
            is_shorter = other is None or evaluated.seconds < other.seconds
            if is_shorter and evaluated.estimate.fullest.total <= level * self._limit:
                self._shortest[level] = evaluated

    def _compile(self, progress: Progress) -> None:
        """Compile orders for the ranks and microbatches of the best, within the memory that is left."""
        if self._compiles is Compiles.NEVER:
            return
        if self.result.stopped and self.result.stopped.why == INTERRUPTED:
            return
        cuts = to_compile(self.result.named, self._space, self._workloads)
        cuts = [cut for cut in cuts if cut not in self._tried]
        compiler = Compiler(self._space, self._workloads, self._limit, self._margin)
        infeasible = "the layers of none of the best fill two chunks a rank: give another number of layers"
        has_some = bool(self.result.best)
        if self._compiles is Compiles.ONLY:
            self.result.best.clear()
            self._alike.clear()
            self._shortest.clear()
            self.result.frontier.clear()
        try:
            for number, cut in enumerate(cuts):
                progress("compiling", number, len(cuts))
                if self.budget.is_spent() and self.result.best:
                    self._stop(_SPENT.format(self.budget.seconds), ())
                    break
                self._tried.add(cut)
                evaluated = compiler.compiled(cut)
                if isinstance(evaluated, str):
                    infeasible = evaluated
                else:
                    self.result.replayed += 1
                    self._offer(evaluated)
        except KeyboardInterrupt:
            self._stop(INTERRUPTED, ())
            if not self.result.best:
                raise
        if has_some and not self.result.best:
            raise ValueError(f"{FLEX} finds nothing: {infeasible}")

    def _replayed(self, candidate: Candidate, limit: float) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or its fullest rank's memory; None if it is too slow."""
        outcome = self._replays.replayed(candidate, limit, lambda seconds: self._headroom(seconds, candidate))
        if isinstance(outcome, RankMemory) and outcome.total > self._limit and len(self.result.too_large) < 3:
            self.result.too_large.append((candidate, outcome))
        return outcome

    def _varied(self, candidate: Candidate, limit: float) -> Evaluated | None:
        """Return a variant of the candidate that fits, if there is one and it is not too slow."""
        return self._replays.varied(candidate, limit, lambda seconds: self._headroom(seconds, candidate))

    def _nothing_fits(self) -> str:
        if self.result.stopped:
            stopped = self.result.stopped
            return f"nothing that fits was found: {stopped}: give more --cpu-seconds, or fix sizes"
        candidates = [pair for pair in (self._bounding.smallest, *self.result.too_large) if pair is not None]
        candidate, fullest = min(candidates, key=lambda pair: pair[1].total)
        name, size = max(fullest.components(), key=lambda pair: pair[1])
        return (
            f"the model fits nowhere: {candidate.name} needs least, {fullest.total / 1e9:.1f} GB on its "
            f"fullest rank, {(fullest.total - self._limit) / 1e9:.1f} GB more than "
            f"{self._limit / 1e9:.1f} GB, {size / 1e9:.1f} GB of it {name}: take more GPUs, or larger ones"
        )
