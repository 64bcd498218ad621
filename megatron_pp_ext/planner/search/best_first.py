"""The search for the configuration with the shortest step among all that are legal and fit.

Every candidate gets a lower bound on its step.  The candidates are replayed action by action in the
order of their bounds, and the search ends when no remaining bound is below the step of the last of the
best: no other candidate can be among them.  A candidate that fits in no order gets no bound at all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import requested_limit
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory, least_memory_sharing
from megatron_pp_ext.planner.step.estimate import MARGIN, Estimate, RankMemory, estimate, memory, rank_memory
from megatron_pp_ext.planner.step.programs import Program, placement_of, program, splits_backward
from megatron_pp_ext.planner.step.stage_parts import Pieces
from megatron_pp_ext.planner.step.workload import Workload, model_on
from megatron_pp_ext.planner.system import System
from megatron_pp_ext.request.layers import spread
from megatron_pp_ext.request.pipeline import named
from megatron_pp_ext.request.vocabulary_source import compiled_beside_vocabulary
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import FLEX
from megatron_pp_ext.schedule.placement import Placement

LEVELS = (1.0, 0.75, 0.5, 0.375, 0.25)
"""The fractions of the memory for each of which the frontier holds the shortest step."""

COMPILED, COMPILE_TRIALS = 2, 100
"""The number of the best layouts for which ``flex`` is compiled, and the orders that each may try."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate with lower bounds on its step, in seconds, and on the bytes of its fullest rank."""

    bound: float
    least: float
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate


@dataclass
class Result:
    """The best candidates by step, and the shortest step for each fraction of the memory.

    ``too_large`` are the three candidates with the lowest bounds that only memory keeps out, each with its
    fullest rank.  ``legal`` counts all candidates, ``unfit`` those that fit in no order, ``replayed``
    those that were timed action by action.
    """

    best: list[Evaluated] = field(default_factory=list)
    frontier: list[Evaluated] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    legal: int = 0
    unfit: int = 0
    replayed: int = 0


HEADROOM = 0.06
"""The share of a device's memory that a search leaves free by default, for what no model counts."""


class Compiles(Enum):
    """Whether orders are compiled: never, in addition to the best of the families, or instead of them."""

    NEVER = "never"
    TOO = "too"
    ONLY = "only"


Progress = Callable[[str, int, int], None]
"""A callback that is given the current phase, how much of it is done, and how much there is."""


class Search:
    """A search of ``space`` for ``system``, of which ``limit`` bytes a GPU may be used."""

    def __init__(
        self,
        space: Space,
        system: System,
        limit: float,
        margin: float = MARGIN,
        top: int = 10,
        compiles: Compiles = Compiles.NEVER,
    ) -> None:
        self._space, self._system, self._compiles = space, system, compiles
        self._limit, self._margin, self._top = limit, margin, top
        self.result = Result()
        self._models: dict[tuple[object, ...], Pieces] = {}
        self._smallest: tuple[Candidate, RankMemory] | None = None
        self._shortest: dict[float, Evaluated] = {}

    def run(self, progress: Progress = lambda what, done, total: None) -> Result:
        """Search; ValueError where nothing is legal or nothing fits."""
        gpus, each = self._space.gpus, self._space.gpus_per_node
        if gpus > each and gpus % each:
            below = gpus // each * each
            raise ValueError(
                f"--gpus {gpus} leaves a node of {each} GPUs in part: nearest that work are {below} and "
                f"{below + each}"
            )
        bounded = sorted(self._bounded(progress), key=lambda one: one.bound)
        if not self.result.legal:
            raise ValueError(self._space.nothing_legal())
        for number, one in enumerate(bounded):
            progress("replaying", number, len(bounded))
            room = self._room(one.bound)
            if not room:
                break
            if one.least <= room and (found := self._replayed(one.candidate, room)):
                self._offer(found)
        progress("replaying", len(bounded), len(bounded))
        if self._compiles is not Compiles.NEVER:
            self._compile(progress)
        if not self.result.best:
            raise ValueError(self._nothing_fits())
        frontier = set(self._shortest.values())
        self.result.frontier = sorted(frontier, key=lambda one: one.estimate.fullest.total)
        return self.result

    def _room(self, bound: float) -> float:
        """Return the most memory in which a step of ``bound`` seconds would still be among the results.

        It is 0 where such a step is neither among the best nor on the frontier.
        """
        best = self.result.best
        if len(best) < self._top or bound < best[-1].estimate.step_seconds:
            return self._limit
        levels = [level for level in LEVELS if level not in self._shortest]
        levels += [level for level, one in self._shortest.items() if bound < one.estimate.step_seconds]
        return max(levels, default=0.0) * self._limit

    def _offer(self, found: Evaluated) -> None:
        """Add ``found`` to the best and to the frontier where it belongs there."""
        ranked = sorted([*self.result.best, found], key=lambda one: one.estimate.step_seconds)
        self.result.best = ranked[: self._top]
        for level in LEVELS:
            other = self._shortest.get(level)
            is_shorter = other is None or found.estimate.step_seconds < other.estimate.step_seconds
            if is_shorter and found.estimate.fullest.total <= level * self._limit:
                self._shortest[level] = found

    def _compile(self, progress: Progress) -> None:
        """Compile orders for the ranks and microbatches of the best, within the memory that is left."""
        cuts = [
            replace(one.candidate, schedule=FLEX, chunks=2)
            for one in self.result.best
            if one.candidate.pipeline > 1 and one.candidate.recompute.method != "block"
            if spread(self._space.args) % (2 * one.candidate.pipeline) == 0
        ]
        chosen = list(dict.fromkeys(cuts))[:COMPILED]
        infeasible = "the layers of none of the best fill two chunks a rank: give another number of layers"
        has_some = bool(self.result.best)
        if self._compiles is Compiles.ONLY:
            self.result.best.clear()
            self._shortest.clear()
        for number, cut in enumerate(chosen):
            progress("compiling", number, len(chosen))
            work = self._work(cut, cut.placement, is_split=True)
            limit = self._left(work)
            if limit <= 0:
                infeasible = "weights, gradients and optimizer leave no memory: take more GPUs"
                continue
            given = self._space.args.pipeline_memory_limit
            whole = self._work(cut, replace(cut.placement, shares_vocabulary=False), is_split=True).costs
            if given and requested_limit(given, cut.pipeline, cut.microbatches, whole)[0] < limit:
                limit = given
            try:
                schedule = _compiled(cut, whole, work.costs, limit)
            except InfeasibleLimit as error:
                infeasible = str(error)
                continue
            work = self._work(cut, schedule.placement, is_split=True)
            found = estimate(work, Program(schedule), FLEX, cut.microbatches, self._margin)
            self.result.replayed += 1
            if found.fullest.total <= self._limit:
                self._offer(Evaluated(replace(cut, limit=limit), found))
            else:
                needed = found.fullest.total / 1e9
                infeasible = f"within --pipeline-memory-limit {limit:g} it needs {needed:.1f} GB: lower it"
        if has_some and not self.result.best:
            raise ValueError(f"{FLEX} finds nothing: {infeasible}")

    def _left(self, work: Workload) -> int:
        """Return the bytes that the fullest rank has left for activations and messages."""
        kept = (rank_memory(work, rank, 0.0, 0, self._margin) for rank in range(len(work.states)))
        room = (
            (self._limit - one.weights - one.gradients - one.optimizer, one.loss + one.messages)
            for one in kept
        )
        return int(min(left / (1 + self._margin) - others for left, others in room))

    def _bounded(self, progress: Progress) -> Iterator[Bounded]:
        """Yield all candidates that may fit, with their bounds."""
        cuts = list(self._space.cuts())
        for number, cut in enumerate(cuts):
            progress("bounding", number, len(cuts))
            for chunks, names in self._space.orders(cut):
                for recompute in self._space.recomputes(cut, chunks):
                    yield from self._sizes(replace(cut, recompute=recompute, chunks=chunks), names)

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
                sized = replace(sized, shares_vocabulary=placement.shares_vocabulary)
                work = self._work(sized, placement)
                fullest = least_memory(work, sized.microbatches, self._margin)
                if fullest.total > self._limit:
                    self.result.unfit += len(here)
                    if self._smallest is None or fullest.total < self._smallest[1].total:
                        self._smallest = replace(sized, schedule=here[0]), fullest
                    continue
                is_full = False
                whole, split = bounds(work, sized.microbatches)
                for name in here:
                    bound = split if splits_backward(name) else whole
                    yield Bounded(bound, fullest.total, replace(sized, schedule=name))

    def _replayed(self, candidate: Candidate, limit: float) -> Evaluated | None:
        """Return the candidate with its estimate, or None if it does not fit into ``limit``."""
        work = self._work(candidate, candidate.placement, splits_backward(candidate.schedule))
        name, ranks, chunks = candidate.schedule, candidate.pipeline, candidate.chunks
        microbatches, shares = candidate.microbatches, candidate.shares_vocabulary
        if shares:
            fullest = least_memory_sharing(work, name, microbatches, self._margin)
        else:
            # More microbatches need no less memory, and a short order is built sooner.
            short = program(name, ranks, min(microbatches, 2 * ranks), chunks)
            kept = memory(work, short, name, microbatches, self._margin)
            fullest = max(kept, key=lambda rank: rank.total)
        if fullest.total <= limit:
            self.result.replayed += 1
            order = program(name, ranks, microbatches, chunks, shares)
            found = estimate(work, order, name, microbatches, self._margin)
            if found.fullest.total <= limit:
                return Evaluated(candidate, found)
            fullest = found.fullest
        if fullest.total > self._limit and len(self.result.too_large) < 3:
            self.result.too_large.append((candidate, fullest))
        return None

    def _work(self, candidate: Candidate, placement: Placement, is_split: bool = False) -> Workload:
        """Return its stages with their costs; candidates that share the costs of a layer share a model.

        Backwards that are not split take no longer than split ones, which lower bounds rely on.
        """
        args, one = candidate.described(self._space.args), candidate
        key = one.tensor, one.context, one.expert, one.micro_batch, one.recompute.modules
        if key not in self._models:
            self._models[key] = model_on(args, self._system)
        model = self._models[key]
        return Workload(args, self._system, placement, one.data, model=model, is_split=is_split)

    def _nothing_fits(self) -> str:
        candidates = [pair for pair in (self._smallest, *self.result.too_large) if pair is not None]
        candidate, fullest = min(candidates, key=lambda pair: pair[1].total)
        name, size = max(fullest.components(), key=lambda pair: pair[1])
        return (
            f"the model fits nowhere: {candidate.name} needs least, {fullest.total / 1e9:.1f} GB on its "
            f"fullest rank, {(fullest.total - self._limit) / 1e9:.1f} GB more than "
            f"{self._limit / 1e9:.1f} GB, {size / 1e9:.1f} GB of it {name}: take more GPUs, or larger ones"
        )


def _compiled(cut: Candidate, whole: Costs, costs: Costs, limit: float) -> Schedule:
    """Compile the order of ``cut``; InfeasibleLimit where it cannot keep ``limit``.

    ``whole`` are the costs with the vocabulary in the end stages, ``costs`` those of ``cut``.
    """
    request = named(FLEX, cut.pipeline, cut.microbatches, cut.chunks, limit)
    if not cut.shares_vocabulary:
        return request.compile(costs, COMPILE_TRIALS).timeline.schedule
    schedule = compiled_beside_vocabulary(request, whole, costs, COMPILE_TRIALS).known
    assert schedule is not None
    return schedule
