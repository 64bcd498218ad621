"""Orders that are compiled for the ranks and microbatches of the best candidates of a search."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.compile import InfeasibleLimit
from megatron_pp_ext.compiler.limits import requested_limit
from megatron_pp_ext.planner.search.array_program import ArrayProgram
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.search.workloads import Workloads
from megatron_pp_ext.planner.step.estimate import estimate, rank_memory
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.request.pipeline import named
from megatron_pp_ext.request.vocabulary_source import compiled_beside_vocabulary
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import FLEX

COMPILED, TRIALS = 2, 100
"""The number of the best candidates for which ``flex`` is compiled, and the orders that each may try."""

_CHUNKS = 2


def to_compile(best: Sequence[Evaluated], space: Space, workloads: Workloads) -> list[Candidate]:
    """Return the best candidates whose layers fill two chunks a rank, to be run under ``flex``."""
    found = dict.fromkeys(
        replace(one.candidate, schedule=FLEX, chunks=_CHUNKS, layout=None)
        for one in best
        if one.candidate.pipeline > 1 and one.candidate.recompute.method != "block"
        if space.fills(one.candidate.pipeline, _CHUNKS)
    )
    chosen = list(found)[:COMPILED]
    return [_laid_out(cut, best, workloads) for cut in chosen] if space.is_uneven else chosen


def _laid_out(cut: Candidate, best: Sequence[Evaluated], workloads: Workloads) -> Candidate:
    """Return ``cut`` with the layout of a V of the same sizes among the best, or with equally long stages."""
    for one in best:
        other = one.candidate
        if other.placement == cut.placement and replace(other, schedule=FLEX, layout=None) == cut:
            return replace(cut, layout=other.layout)
    stages = workloads.stages(cut, cut.placement)
    return replace(cut, layout=stages.layout(stages.start))


class Compiler:
    """Compiles for candidates of ``space``, within ``limit`` bytes a GPU."""

    def __init__(self, space: Space, workloads: Workloads, limit: float, margin: float) -> None:
        self._space, self._workloads = space, workloads
        self._limit, self._margin = limit, margin

    def compiled(self, cut: Candidate) -> Evaluated | str:
        """Return ``cut`` with the estimate of its compiled order, or why there is none."""
        work = self._workloads.work(cut)
        limit = float(self._left(work))
        if limit <= 0:
            return "weights, gradients and optimizer leave no memory: take more GPUs"
        given = self._space.args.pipeline_memory_limit
        alone = replace(cut.placement, shares_vocabulary=False)
        whole = self._workloads.work(cut, alone).costs
        if given and requested_limit(given, cut.pipeline, cut.microbatches, whole)[0] < limit:
            limit = given
        try:
            schedule = _schedule(cut, whole, work.costs, limit)
        except InfeasibleLimit as error:
            return str(error)
        work = self._workloads.work(cut, schedule.placement)
        found = estimate(work, ArrayProgram(schedule), FLEX, cut.microbatches, self._margin)
        if found.fullest.total > self._limit:
            needed = found.fullest.total / 1e9
            return f"within --pipeline-memory-limit {limit:g} it needs {needed:.1f} GB: lower it"
        return Evaluated(replace(cut, limit=limit), found)

    def _left(self, work: Workload) -> int:
        """Return the bytes that the fullest rank has left for activations and messages."""
        kept = (rank_memory(work, rank, 0.0, 0, self._margin) for rank in range(len(work.states)))
        room = (
            (self._limit - one.weights - one.gradients - one.optimizer, one.loss + one.messages)
            for one in kept
        )
        return int(min(left / (1 + self._margin) - others for left, others in room))


def _schedule(cut: Candidate, whole: Costs, costs: Costs, limit: float) -> Schedule:
    """Compile the order of ``cut``; InfeasibleLimit where it cannot keep ``limit``.

    ``whole`` are the costs with the vocabulary in the end stages, ``costs`` those of ``cut``.  A layout says
    how many stages there are, so that the compiler may not merge them.
    """
    request = named(FLEX, cut.pipeline, cut.microbatches, cut.chunks, limit)
    if cut.layout is not None:
        placements = tuple(one for one in request.placements if one.chunks == cut.chunks)
        request = replace(request, placements=placements)
    if not cut.shares_vocabulary:
        return request.compile(costs, TRIALS).timeline.schedule
    schedule = compiled_beside_vocabulary(request, whole, costs, TRIALS).known
    assert schedule is not None
    return schedule
