"""Which of all legal configurations takes the shortest step and fits?

Candidates are taken up by a lower bound on their step, the most promising first, and each is then
replayed action by action.  The search ends when no bound left is below the step of the last of the best:
what was never replayed cannot be among them.  What cannot fit in any order is not bounded at all.

time    a rank does all its F, I and W one after the other, the first microbatch has to reach it, and where
        backwards are whole, its last gradient has to travel back to the first stage.
memory  weights, gradients and optimizer state, one microbatch's activations of all of a rank's stages, as
        the backward of its first stage waits for the forward of its last, and the fewest messages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import asked_for, least_messages
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.step.estimate import MARGIN, Estimate, RankMemory, estimate, memory, rank_memory
from megatron_pp_ext.planner.step.programs import compiled, placement_of, program
from megatron_pp_ext.planner.step.stage_parts import Pieces
from megatron_pp_ext.planner.step.workload import Workload, model_on
from megatron_pp_ext.planner.system import System
from megatron_pp_ext.request.layers import spread
from megatron_pp_ext.schedule.placement import Placement

WHOLE = ("none", "gpipe", "1f1b", "interleaved", "breadth-first", "1f1b-v")
"""The schedules that never split a backward."""

LEVELS = (1.0, 0.75, 0.5, 0.375, 0.25)
"""The fractions of the memory for which the frontier has the shortest step."""


_NEIGHBOURS = 64
"""How many nodes fewer or more GPUs are looked at, where a number of them does not work."""

COMPILED, COMPILE_TRIALS = 2, 100
"""For how many of the best layouts ``flex`` is compiled, and how many orders that may try."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate with the step that it cannot be shorter than, and the bytes that it cannot do with less."""

    bound: float
    least: float
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate and its estimate."""

    candidate: Candidate
    estimate: Estimate


@dataclass
class Result:
    """The best candidates by step, and the shortest step for each fraction of the memory.

    ``too_large`` is the shortest-bounded candidate that is kept out by memory alone, with its fullest
    rank.  ``legal`` counts all candidates, ``unfit`` those that fit in no order, ``replayed`` those that
    were looked at action by action.
    """

    best: list[Evaluated] = field(default_factory=list)
    frontier: list[Evaluated] = field(default_factory=list)
    too_large: list[tuple[Candidate, RankMemory]] = field(default_factory=list)
    legal: int = 0
    unfit: int = 0
    replayed: int = 0


class Compiles(Enum):
    """Whether orders are compiled: not at all, beside the best of the families, or in their place."""

    NEVER = "never"
    TOO = "too"
    ONLY = "only"


Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""


class Search:
    """A search of ``space`` for ``system``, of whose memory ``limit`` bytes a GPU may be used."""

    def __init__(
        self,
        space: Space,
        system: System,
        limit: float,
        margin: float = MARGIN,
        top: int = 10,
        compiles: Compiles = Compiles.NEVER,
    ) -> None:
        self._space, self._system, self._limit, self._margin, self._top = space, system, limit, margin, top
        self._compiles = compiles
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
            raise ValueError(self._nothing_legal())
        for number, one in enumerate(bounded):
            progress("replaying", number, len(bounded))
            room = self._room(one.bound)
            if not room:
                break
            if one.least <= room and (found := self._look_at(one.candidate, room)):
                self._offer(found)
        progress("replaying", len(bounded), len(bounded))
        if self._compiles is not Compiles.NEVER:
            self._compile(progress)
        if not self.result.best:
            raise ValueError(self._nothing_fits())
        self.result.frontier = sorted(
            set(self._shortest.values()), key=lambda one: one.estimate.fullest.total
        )
        return self.result

    def _room(self, bound: float) -> float:
        """The most memory in which a step of ``bound`` seconds would still be news; 0 if in none."""
        best = self.result.best
        if len(best) < self._top or bound < best[-1].estimate.step_seconds:
            return self._limit
        levels = [level for level in LEVELS if level not in self._shortest]
        levels += [level for level, one in self._shortest.items() if bound < one.estimate.step_seconds]
        return max(levels, default=0.0) * self._limit

    def _offer(self, found: Evaluated) -> None:
        """Put it among the best, and on the frontier, where it belongs there."""
        ranked = sorted([*self.result.best, found], key=lambda one: one.estimate.step_seconds)
        self.result.best = ranked[: self._top]
        for level in LEVELS:
            other = self._shortest.get(level)
            is_shorter = other is None or found.estimate.step_seconds < other.estimate.step_seconds
            if is_shorter and found.estimate.fullest.total <= level * self._limit:
                self._shortest[level] = found

    def _compile(self, progress: Progress) -> None:
        """Have an order compiled for the ranks and microbatches of the best, within what memory is left."""
        cuts = [
            replace(one.candidate, schedule="flex", chunks=2)
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
            work = self._work(cut, cut.placement)
            limit = self._left(work)
            if limit <= 0:
                infeasible = "weights, gradients and optimizer leave no memory: take more GPUs"
                continue
            asked = self._space.args.pipeline_memory_limit
            if asked and asked_for(asked, cut.pipeline, cut.microbatches, work.costs)[0] < limit:
                limit = asked
            try:
                order, placement = compiled(cut.pipeline, cut.microbatches, work.costs, limit, COMPILE_TRIALS)
            except InfeasibleLimit as error:
                infeasible = str(error)
                continue
            work = self._work(cut, placement)
            found = estimate(work, order, "flex", cut.microbatches, self._margin)
            self.result.replayed += 1
            if found.fullest.total <= self._limit:
                self._offer(Evaluated(replace(cut, limit=limit), found))
            else:
                needed = found.fullest.total / 1e9
                infeasible = f"within --pipeline-memory-limit {limit:g} it needs {needed:.1f} GB: lower it"
        if has_some and not self.result.best:
            raise ValueError(f"flex finds nothing: {infeasible}")

    def _left(self, work: Workload) -> int:
        """Bytes of activations and messages that the rank with the least room has."""
        room = []
        for rank, state in enumerate(work.states):
            loss = work.loss_workspace if rank == work.head_rank else 0.0
            left = self._limit - state.weights - state.gradients - state.optimizer
            room.append(left / (1 + self._margin) - loss)
        return int(min(room))

    def _bounded(self, progress: Progress) -> Iterator[Bounded]:
        """All candidates that may fit, with their bounds."""
        cuts = list(self._space.cuts())
        for number, cut in enumerate(cuts):
            progress("bounding", number, len(cuts))
            for chunks, names in self._space.orders(cut):
                for recompute in self._space.recomputes(cut, chunks):
                    one = replace(cut, recompute=recompute, chunks=chunks)
                    yield from self._sizes(one, names)

    def _sizes(self, cut: Candidate, names: Sequence[str]) -> Iterator[Bounded]:
        """``cut`` with all microbatches and schedules; larger microbatches only need more memory."""
        is_full = False
        for sized in self._space.refined(cut):
            self.result.legal += len(names)
            if is_full:
                self.result.unfit += len(names)
                continue
            placements: dict[Placement, list[str]] = {}
            for name in names:
                placements.setdefault(placement_of(name, cut.pipeline, cut.chunks), []).append(name)
            is_full = True
            for placement, here in placements.items():
                work = self._work(sized, placement)
                fullest = self._least(work, sized.microbatches)
                if fullest.total > self._limit:
                    self.result.unfit += len(here)
                    self._note_smallest(replace(sized, schedule=here[0]), fullest)
                    continue
                is_full = False
                whole, split = bounds(work, sized.microbatches)
                for name in here:
                    bound = whole if name in WHOLE else split
                    yield Bounded(bound, fullest.total, replace(sized, schedule=name))

    def _look_at(self, candidate: Candidate, limit: float) -> Evaluated | None:
        """Its estimate, None if it does not fit into ``limit``."""
        work = self._work(candidate, candidate.placement)
        name, ranks, chunks = candidate.schedule, candidate.pipeline, candidate.chunks
        # More microbatches need no less memory; a short order is built sooner.
        short = program(name, ranks, min(candidate.microbatches, 2 * ranks), chunks)
        kept = memory(work, short, name, candidate.microbatches, self._margin)
        fullest = max(kept, key=lambda rank: rank.total)
        if fullest.total <= limit:
            self.result.replayed += 1
            order = program(name, ranks, candidate.microbatches, chunks)
            found = estimate(work, order, name, candidate.microbatches, self._margin)
            if found.fullest.total <= limit:
                return Evaluated(candidate, found)
            fullest = found.fullest
        if fullest.total > self._limit and len(self.result.too_large) < 3:
            self.result.too_large.append((candidate, fullest))
        return None

    def _work(self, candidate: Candidate, placement: Placement) -> Workload:
        """Its stages; what layers cost is kept for all candidates that share it."""
        args = candidate.described(self._space.args)
        modules = candidate.recompute.modules
        key = candidate.tensor, candidate.context, candidate.expert, candidate.micro_batch, modules
        if key not in self._models:
            self._models[key] = model_on(args, self._system)
        return Workload(args, self._system, placement, candidate.data, model=self._models[key])

    def _least(self, work: Workload, microbatches: int) -> RankMemory:
        """What the fullest rank needs in any order."""
        ranks = {id(part): rank for rank, part in enumerate(work.by_rank)}
        found = (
            rank_memory(
                work,
                rank,
                work.by_rank[rank].after_forward,
                least_messages(work.placement, rank, microbatches),
                self._margin,
            )
            for rank in {*ranks.values(), work.head_rank}
        )
        return max(found, key=lambda one: one.total)

    def _note_smallest(self, candidate: Candidate, fullest: RankMemory) -> None:
        if self._smallest is None or fullest.total < self._smallest[1].total:
            self._smallest = candidate, fullest

    def _nothing_fits(self) -> str:
        candidates = [pair for pair in (self._smallest, *self.result.too_large) if pair is not None]
        candidate, fullest = min(candidates, key=lambda pair: pair[1].total)
        name, size = max(fullest.components(), key=lambda pair: pair[1])
        return (
            f"the model fits nowhere: {candidate.name} needs least, {fullest.total / 1e9:.1f} GB on its "
            f"fullest rank, {(fullest.total - self._limit) / 1e9:.1f} GB more than "
            f"{self._limit / 1e9:.1f} GB, {size / 1e9:.1f} GB of it {name}: take more GPUs, or larger ones"
        )

    def _nothing_legal(self) -> str:
        """The nearest numbers of GPUs that do work."""
        space = self._space

        def works(gpus: int) -> bool:
            tried = replace(space, gpus=gpus)
            fills_nodes = gpus <= space.gpus_per_node or gpus % space.gpus_per_node == 0
            return fills_nodes and any(any(True for _ in tried.orders(cut)) for cut in tried.cuts())

        distances = range(1, _NEIGHBOURS * space.gpus_per_node)
        below = next((space.gpus - d for d in distances if d < space.gpus and works(space.gpus - d)), None)
        above = next((space.gpus + d for d in distances if works(space.gpus + d)), None)
        nearest = " and ".join(str(number) for number in (below, above) if number)
        return (
            f"no combination of parallel sizes divides --gpus {space.gpus} and --global-batch-size "
            f"{space.batch} for this model" + (f": nearest that work are {nearest}" if nearest else "")
        )


def bounds(work: Workload, microbatches: int) -> tuple[float, float]:
    """Seconds below which no step can be: with whole backwards, and with split ones.

    In every placement rank r has stage r first.
    """
    hop, head, tail, whole, split = work.costs.hop, 0.0, 0.0, 0.0, 0.0
    for stage, own in zip(work.costs.stages, work.by_rank, strict=False):
        seconds = own.forward_seconds + own.input_gradient_seconds + own.weight_gradient_seconds
        busy = head + microbatches * seconds
        split, whole = max(split, busy), max(whole, busy + tail)
        head += stage.forward + hop
        tail += stage.input_gradient + stage.weight_gradient + hop
    around = max(wait.update for wait in work.waits) + work.tied_seconds
    return whole + around, split + around
