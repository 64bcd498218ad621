"""Orders that are compiled for the ranks and microbatches of the best candidates of a search."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import le

from megatron_pp_ext.compiler.limits import InfeasibleLimit, Limit, requested_budget
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.job import pipeline
from megatron_pp_ext.planner.search.candidate import Candidate, of_option
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.replays import Evaluated, Workloads
from megatron_pp_ext.planner.step.estimate import StepModel, memory_beside, planning_costs
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.placement import Placement

COMPILED, TRIALS = 2, 100
"""The number of the best candidates for which ``flex`` is compiled, and the orders that each may try."""

_CHUNKS = 2


def to_compile(best: Sequence[Evaluated], space: Space, workloads: Workloads) -> list[Candidate]:
    """Return the best candidates whose layers fill two chunks a rank, to be run under ``flex``."""
    candidates = dict.fromkeys(
        space.described(replace(evaluated.candidate, schedule=FLEX, chunks=_CHUNKS, layout=None, choice=None))
        for evaluated in best
        if evaluated.candidate.pipeline > 1 and evaluated.candidate.recompute.method != "block"
        if space.fills(evaluated.candidate.pipeline, _CHUNKS)
    )
    cuts = list(candidates)[:COMPILED]
    return [_laid_out(cut, best, workloads) for cut in cuts] if space.is_uneven else cuts


def _laid_out(cut: Candidate, best: Sequence[Evaluated], workloads: Workloads) -> Candidate:
    """Return ``cut`` with the layout of a V of the same sizes among the best, or with equally long stages."""
    for evaluated in best:
        other = evaluated.candidate
        if (
            other.placement == cut.placement
            and replace(other, schedule=FLEX, layout=None, choice=None) == cut
        ):
            return replace(cut, layout=other.layout)
    stages = workloads.stages(cut, cut.placement)
    return replace(cut, layout=stages.layout(stages.start))


class Compiler:
    """Compiles for candidates of ``space``, within ``limit`` bytes a GPU.

    ValueError where --pipeline-memory-limit is no number.
    """

    def __init__(self, space: Space, workloads: Workloads, limit: float, margin: float) -> None:
        self._workloads = workloads
        self._limit, self._margin = limit, margin
        self._given = space.job.pipeline.pipeline_memory_limit
        if self._given is not None:
            pipeline.numbers(self._given)

    def compiled(self, cut: Candidate) -> Evaluated | str:
        """Return ``cut`` with the estimate of its compiled order, or why there is none."""
        available = self._available(self._workloads.work(cut))
        if min(available) <= 0:
            return "weights, gradients and optimizer leave no memory: take more GPUs"
        alone = replace(cut.placement, splits_head=False)
        whole = self._workloads.work(cut, alone).costs
        try:
            limits = self._limits(cut, available, whole)
        except ValueError as error:  # numbers for another pipeline
            return str(error)
        tried = [self._within(cut, limit, whole) for limit in limits]
        fitting = [evaluated for evaluated in tried if not isinstance(evaluated, str)]
        # Steps that differ by rounding alone count as equal, and then one number for all ranks wins.
        return (
            min(fitting, key=lambda evaluated: round(evaluated.estimate.step_seconds, 9))
            if fitting
            else tried[0]
        )

    def _limits(self, cut: Candidate, available: tuple[float, ...], whole: Costs) -> list[Limit]:
        """Return the limits to compile ``cut`` with, where the ranks have ``available`` bytes.

        More memory on some ranks need not lead the compiler to a shorter order, and it may choose a placement
        with other stages than ``cut``.  So one number for all ranks competes with one for each.
        """
        if self._given is not None:
            limit = pipeline.read_limit(self._given, cut.pipeline)
            amounts = requested_budget(limit, cut.pipeline, cut.microbatches, whole).ranks
            if all(map(le, amounts, available)):
                return [limit]
            available = tuple(map(min, amounts, available))
        return [min(available), available] if len(set(available)) > 1 else [min(available)]

    def _within(self, cut: Candidate, limit: Limit, whole: Costs, is_last: bool = False) -> Evaluated | str:
        """Return ``cut`` as compiled within ``limit``, or why that cannot be.

        Where its estimate is over the memory of a GPU, a lower limit is tried, unless this is the last one.
        """
        try:
            schedule = _schedule(cut, whole, self._workloads.work(cut), limit)
        except InfeasibleLimit as error:
            return str(error)
        work = self._workloads.work(cut, schedule.placement)
        estimated = StepModel(
            work, Prepared(schedule, is_repeated=True), FLEX, cut.microbatches, self._margin
        ).estimate()
        if estimated.fullest.total > self._limit:
            if self._given is None and not is_last:
                # What features keep on top of activations, such as gradients of keys and values.
                over = math.ceil((estimated.fullest.total - self._limit) / (1 + self._margin))
                lower = tuple(amount - over for amount in limit) if isinstance(limit, tuple) else limit - over
                return self._within(cut, lower, whole, is_last=True)
            gigabytes = estimated.fullest.total / 1e9
            text = pipeline.spelled(limit)
            return f"within --pipeline-memory-limit {text} it needs {gigabytes:.1f} GB: lower it"
        return Evaluated(replace(cut, limit=limit), estimated)

    def _available(self, work: Workload) -> tuple[float, ...]:
        """Return the whole bytes that each rank has left for activations and messages."""
        fixed = (
            memory_beside(
                work, state, work.loss_bytes(rank, 1 / work.units), 0.0, 0, self._margin, splits=True
            )
            for rank, state in enumerate(work.states)
        )
        return tuple(
            float(int((self._limit - rank_bytes.total) / (1 + self._margin))) for rank_bytes in fixed
        )


def _schedule(cut: Candidate, whole: Costs, work: Workload, limit: Limit) -> Schedule:
    """Compile the order of ``cut``; InfeasibleLimit where it cannot keep ``limit``.

    ``whole`` are the costs with the head in the last stage, ``work`` has those of ``cut``.  A layout says
    how many stages there are, so that the compiler may not merge them.
    """
    request = replace(
        named(FLEX, cut.pipeline, cut.microbatches, cut.chunks, limit),
        splits_head=cut.splits_head,
        options=tuple(of_option(option).in_job(option, work.job) for option in cut.options),
        trials=TRIALS,
    )
    if cut.describes_stages:
        placements = tuple(placement for placement in request.placements if placement.chunks == cut.chunks)
        request = replace(request, placements=placements)

    def costs(placement: Placement) -> Costs:
        return work.costs if placement.splits_head == cut.splits_head else whole

    model = CostModel(costs, planning_costs(work.job).at)
    return make(request, model).schedule
