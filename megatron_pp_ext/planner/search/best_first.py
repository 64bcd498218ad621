"""The search for the configuration with the shortest step among all that are legal and fit.

Every candidate gets a lower bound on its step.  The candidates are replayed action by action in the
order of their bounds, and the search ends when no remaining bound is below the step of the last of the
best: no other candidate can be among them.  A candidate that fits in no order gets no bound at all.  A search
whose budget is spent, or that is interrupted, ends with the best that it has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.planner.search.budget import Budget, Stopped
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.compiled import Compiler, to_compile
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory
from megatron_pp_ext.planner.search.nothing_legal import reason
from megatron_pp_ext.planner.search.replays import Evaluated, Replays
from megatron_pp_ext.planner.search.result import ALIKE, LEVELS, Bounded, Compiles, Result
from megatron_pp_ext.planner.search.variants import tried
from megatron_pp_ext.planner.search.workloads import Workloads
from megatron_pp_ext.planner.step.estimate import MARGIN, RankMemory
from megatron_pp_ext.planner.step.programs import placement_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import FLEX
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.without_collection import without_collection

_SPENT = "stopped after the {:g} s of a processor that --cpu-seconds allows"
_INTERRUPTED = "interrupted"


Progress = Callable[[str, int, int], None]
"""A callback that is given the current phase, how much of it is done, and how much there is."""


class Search:
    """A search of ``space`` for ``system``, of which ``limit`` bytes a GPU may be used, within ``budget``."""

    def __init__(
        self,
        space: Space,
        system: System,
        limit: float,
        margin: float = MARGIN,
        top: int = 10,
        compiles: Compiles = Compiles.NEVER,
        budget: Budget | None = None,
    ) -> None:
        self._space, self._compiles = space, compiles
        self.budget = budget or Budget()
        self._limit, self._margin, self._top = limit, margin, top
        self.result = Result()
        self._workloads = Workloads(space.job, system.at_scale(space.gpus))
        variants = tried(space.job)
        self._of_largest = bool(variants)
        self._replays = Replays(self._workloads, margin, space.is_uneven, variants)
        self._smallest: tuple[Candidate, RankMemory] | None = None
        self._shortest: dict[float, Evaluated] = {}
        self._alike: dict[Candidate, list[Evaluated]] = {}

    def run(self, progress: Progress = lambda what, done, total: None) -> Result:
        """Search; ValueError where nothing is legal, nothing fits, or nothing was found within the budget.

        KeyboardInterrupt where there is no result yet.
        """
        gpus, each = self._space.gpus, self._space.gpus_per_node
        if gpus > each and gpus % each:
            below = gpus // each * each
            raise ValueError(
                f"--gpus {gpus} leaves a node of {each} GPUs in part: nearest that work are {below} and "
                f"{below + each}"
            )
        with without_collection():
            bounded = sorted(self._bounded(progress), key=lambda one: one.bound)
            if not self.result.legal:
                raise ValueError(reason(self._space))
            self._replay(bounded, progress)
        if self._compiles is not Compiles.NEVER:
            self._compile(progress)
        if not self.result.best:
            raise ValueError(self._nothing_fits())
        frontier = set(self._shortest.values())
        self.result.frontier = sorted(frontier, key=lambda one: one.estimate.fullest.total)
        return self.result

    def _replay(self, bounded: Sequence[Bounded], progress: Progress) -> None:
        """Replay candidates in the order of their bounds while any of them may be among the results.

        What memory keeps out is tried in the ways of features after all others: these take longest, and a
        search with them is to end with nothing worse than one without.
        """
        kept_out = self._in_order(bounded, self._replayed, progress)
        if self._replays.variants and not self.result.stopped:
            self._in_order(kept_out, self._varied, progress)
        progress("replaying", len(bounded), len(bounded))

    def _in_order(
        self,
        bounded: Sequence[Bounded],
        replay: Callable[[Candidate, float], Evaluated | RankMemory | None],
        progress: Progress,
    ) -> list[Bounded]:
        """Replay candidates in their order, and return those that ``replay`` finds to need too much."""
        number, kept_out = 0, list[Bounded]()
        try:
            for number, one in enumerate(bounded):
                progress("replaying", number, len(bounded))
                if not self._room(one.bound):
                    break
                compiles = self._compiles is not Compiles.NEVER
                if self.budget.is_spent(leaves_some=compiles, has_result=bool(self.result.best)):
                    self._stop(_SPENT.format(self.budget.seconds), [*kept_out, *bounded[number:]])
                    break
                candidate = one.candidate
                room = self._room(one.bound, candidate)
                if one.least > room:
                    continue
                found = replay(candidate, room)
                if isinstance(found, Evaluated):
                    self.result.replayed += 1
                    self._offer(found)
                elif found is not None:
                    kept_out.append(one)
        except KeyboardInterrupt:
            self._stop(_INTERRUPTED, [*kept_out, *bounded[number:]])
            if not self.result.best:
                raise
        return kept_out

    def _stop(self, why: str, others: Sequence[Bounded]) -> None:
        """Note ``why`` the search ends, with the ``others`` that it has not replayed."""
        least = min((one.bound for one in others), default=0.0)
        self.result.stopped = self.result.stopped or Stopped(why, len(others), least)

    def _room(self, bound: float, candidate: Candidate | None = None) -> float:
        """Return the most memory in which a step of ``bound`` seconds would still be among the results.

        It is 0 where such a step is neither among the best, or nearly the same as one of them but the last,
        nor on the frontier.  Without a ``candidate`` it may be of any sizes.
        """
        best = self.result.best
        longest = _step(best[-1]) if len(best) == self._top else inf
        if candidate is None and len(best) == self._top > 1:
            longest = max(longest, _step(best[-2]) * (1 + ALIKE))
        known = self._alike.get(candidate.apart_from_schedule) if candidate else None
        if known:
            # What is nearly as fast as one of the best is shown after it, however slow the last is.
            alike = _step(known[0]) * (1 + ALIKE)
            longest = alike if _step(known[0]) <= longest else min(longest, alike)
        if bound < longest:
            return self._limit
        levels = [level for level in LEVELS if level not in self._shortest]
        levels += [level for level, one in self._shortest.items() if bound < one.estimate.step_seconds]
        return max(levels, default=0.0) * self._limit

    def _offer(self, evaluated: Evaluated) -> None:
        """Add ``evaluated`` to the best and to the frontier where it belongs there."""
        sizes = evaluated.candidate.apart_from_schedule
        alike = sorted([*self._alike.get(sizes, []), evaluated], key=_step)
        self._alike[sizes] = [one for one in alike if _step(one) <= _step(alike[0]) * (1 + ALIKE)]
        ranked = sorted(self._alike.values(), key=lambda group: _step(group[0]))[: self._top]
        self.result.best = [first for first, *_ in ranked]
        self.result.alike = {first.candidate: others for first, *others in ranked}
        for level in LEVELS:
            other = self._shortest.get(level)
            is_shorter = other is None or _step(evaluated) < _step(other)
            if is_shorter and evaluated.estimate.fullest.total <= level * self._limit:
                self._shortest[level] = evaluated

    def _compile(self, progress: Progress) -> None:
        """Compile orders for the ranks and microbatches of the best, within the memory that is left."""
        if self.result.stopped and self.result.stopped.why == _INTERRUPTED:
            return
        chosen = to_compile(self.result.named, self._space, self._workloads)
        compiler = Compiler(self._space, self._workloads, self._limit, self._margin)
        infeasible = "the layers of none of the best fill two chunks a rank: give another number of layers"
        has_some = bool(self.result.best)
        if self._compiles is Compiles.ONLY:
            self.result.best.clear()
            self._alike.clear()
            self._shortest.clear()
        try:
            for number, cut in enumerate(chosen):
                progress("compiling", number, len(chosen))
                if self.budget.is_spent() and self.result.best:
                    self._stop(_SPENT.format(self.budget.seconds), ())
                    break
                evaluated = compiler.compiled(cut)
                if isinstance(evaluated, str):
                    infeasible = evaluated
                else:
                    self.result.replayed += 1
                    self._offer(evaluated)
        except KeyboardInterrupt:
            self._stop(_INTERRUPTED, ())
            if not self.result.best:
                raise
        if has_some and not self.result.best:
            raise ValueError(f"{FLEX} finds nothing: {infeasible}")

    def _bounded(self, progress: Progress) -> Iterator[Bounded]:
        """Yield all candidates that may fit, with their bounds."""
        cuts = list(self._space.cuts())
        for number, cut in enumerate(cuts):
            progress("bounding", number, len(cuts))
            for chunks, names in self._space.orders(cut):
                for recompute in self._space.recomputes(cut, chunks):
                    chunked = self._space.described(replace(cut, recompute=recompute, chunks=chunks))
                    yield from self._sizes(chunked, names)

    def _sizes(self, cut: Candidate, names: Sequence[str]) -> Iterator[Bounded]:
        """Yield ``cut`` with all microbatches and schedules that may fit, with their bounds.

        The smallest microbatch comes first, and larger ones only need more memory.
        """
        is_full = False
        placements: dict[Placement, list[str]] = {}
        for shares, name in product(self._space.sharing(cut), names):
            placement = placement_of(name, cut.pipeline, cut.chunks, shares)
            placements.setdefault(placement, []).append(name)
        legal = sum(map(len, placements.values()))
        for sized in self._space.refined(cut):
            self.result.legal += legal
            if is_full:
                self.result.unfit += legal
                continue
            is_full = True
            for placement, here in placements.items():
                if sized.splits_head != placement.splits_head:
                    sized = replace(sized, splits_head=placement.splits_head)
                fullest, least_seconds = self._least(sized, placement)
                if fullest.total > self._limit:
                    self.result.unfit += len(here)
                    if self._smallest is None or fullest.total < self._smallest[1].total:
                        self._smallest = replace(sized, schedule=here[0]), fullest
                    continue
                is_full = False
                whole, split = least_seconds()
                for name in here:
                    bound = split if catalog.abilities(name).splits_backward else whole
                    yield Bounded(bound, fullest.total, sized, name)

    def _least(
        self, candidate: Candidate, placement: Placement
    ) -> tuple[RankMemory, Callable[[], tuple[float, float]]]:
        """Return what the fullest rank of a candidate needs at least, and what returns the least seconds.

        The latter are of a step with whole and with split backwards.
        """
        microbatches = candidate.microbatches
        if self._space.is_uneven and placement.ranks > 1:
            mean = self._workloads.mean(candidate, placement)
            least = mean.memory(microbatches, self._margin, of_largest=self._of_largest)
            return least, partial(mean.bounds, microbatches)
        work = self._workloads.work(candidate, placement)
        least = least_memory(work, microbatches, self._margin, self._of_largest)
        return least, partial(bounds, work, microbatches)

    def _replayed(self, candidate: Candidate, limit: float) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, what its fullest rank needs, or None if it is too slow."""
        found = self._replays.replayed(candidate, limit, lambda seconds: self._room(seconds, candidate))
        if isinstance(found, RankMemory) and found.total > self._limit and len(self.result.too_large) < 3:
            self.result.too_large.append((candidate, found))
        return found

    def _varied(self, candidate: Candidate, limit: float) -> Evaluated | None:
        """Return a variant of the candidate that fits, if there is one and it is not too slow."""
        return self._replays.varied(candidate, limit, lambda seconds: self._room(seconds, candidate))

    def _nothing_fits(self) -> str:
        if self.result.stopped:
            stopped = self.result.stopped
            return f"nothing that fits was found: {stopped}: give more --cpu-seconds, or fix sizes"
        candidates = [pair for pair in (self._smallest, *self.result.too_large) if pair is not None]
        candidate, fullest = min(candidates, key=lambda pair: pair[1].total)
        name, size = max(fullest.components(), key=lambda pair: pair[1])
        return (
            f"the model fits nowhere: {candidate.name} needs least, {fullest.total / 1e9:.1f} GB on its "
            f"fullest rank, {(fullest.total - self._limit) / 1e9:.1f} GB more than "
            f"{self._limit / 1e9:.1f} GB, {size / 1e9:.1f} GB of it {name}: take more GPUs, or larger ones"
        )


def _step(one: Evaluated) -> float:
    return one.estimate.step_seconds
