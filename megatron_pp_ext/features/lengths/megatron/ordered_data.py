"""Training steps whose microbatches are read ahead and run in a planned order.

What microbatch k of the schedule reads is microbatch ``order[k]`` of the data, on every stage, and the losses
are handed over in the order of the data.  The schedule has its order of F and I; W go into the holes of this
step, and ranks launch by the times of its microbatches.  Evaluations are left alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from megatron_pp_ext.features.lengths.megatron.agreement import Agreed, Documents, agree
from megatron_pp_ext.features.lengths.megatron.known_shapes import KnownShapes
from megatron_pp_ext.features.lengths.megatron.run_costs import RunCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.lengths.plan import BUDGET, Plan, Planner
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.flushed import require_same_schedule
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.runtime.first_rank import print_rank_0
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule.announcements import Announced
from megatron_pp_ext.schedule.unit_costs import UnitCosts
from megatron_pp_ext.schedule.without_collection import without_collection

SEARCHING = 0.75
"""The part of the time for a plan in which an order is searched for; costs and W take the rest."""


class Ordered:
    """Orders the steps of ``pipeline``, of whose chunks those that ``are_read`` read data; None for all.

    ``shapes`` are what earlier steps have shown.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ordering: Ordering,
        are_read: Sequence[bool] | None = None,
        shapes: KnownShapes | None = None,
    ) -> None:
        self.ordering, self.costs, self._are_read = ordering, RunCosts(pipeline, ordering), are_read
        self._may_move = pipeline.request.from_file is None
        self._planners: dict[int, Planner] = {}
        self._shapes = shapes or KnownShapes()

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Let the step run in the planned order; evaluations are left alone."""
        inputs = step.inputs
        if inputs.forward_only:
            yield
            return
        step.may_move_weights = self.moves_weights(step)
        self.costs.learn(step)
        data: list[list[Any] | None] = []
        agreed = agree(
            lambda: read_documents(inputs, data, self.ordering, self._are_read),
            inputs,
            self.costs.work,
            lambda: self._shapes.known_sizes(inputs, data),
            self._shapes.are_trusted,
        )
        if agreed.unknown:
            self._leave_as_given(agreed.unknown)
        found = self._planned(step, agreed) if agreed.planned else None
        order = range(inputs.microbatches) if found is None else found.order
        if agreed.own:
            self.costs.note(inputs.training_steps, Microbatches(agreed.own).ordered(order))
        inputs.iterators = [
            iterator if batches is None else iter([batches[number] for number in order])
            for iterator, batches in zip(inputs.iterators, data, strict=True)
        ]
        announced = inputs.announces if self._shapes.are_announced(inputs, agreed) else Announced.NOTHING
        if found is not None and found.schedule is not step.schedule:
            with without_collection():
                step.plan = plan_rank(found.schedule, step.plan.rank, announced=announced)
            require_same_schedule(found.schedule, inputs.groups)
        with self._shapes.step(inputs, agreed, order):
            yield
        if inputs.losses:
            by_number = dict(zip(order, inputs.losses, strict=True))
            inputs.losses[:] = [by_number[number] for number in range(len(order))]

    def _planned(self, step: Step, agreed: Agreed) -> Plan:
        costs = self.costs.of(Microbatches(agreed.planned))
        return self.planner(step).timed(self.plan(step, costs), costs)

    def plan(self, step: Step, costs: UnitCosts) -> Plan:
        """Return the plan of a step whose microbatches have these ``costs``."""
        return self.planner(step).plan(costs, self.ordering.how, budget=SEARCHING * BUDGET)

    def planner(self, step: Step) -> Planner:
        """Return the planner of the schedule that is in force, which is kept for later steps."""
        schedule = step.schedule
        planner = self._planners.get(schedule.microbatches)
        if planner is None or planner.schedule is not schedule:
            planner = self._planners[schedule.microbatches] = Planner(schedule, step.may_move_weights)
        return planner

    def moves_weights(self, step: Step) -> bool:
        """Whether W may be moved: not those of a file, nor where copies or pairs are planned around them."""
        schedule = step.schedule
        is_free = self._may_move and schedule.splits_backward and not (schedule.paired or schedule.copies)
        return is_free and not step.inputs.config.fine_grained_activation_offloading

    def _leave_as_given(self, why: str) -> None:
        if not self.ordering.is_default:
            raise RuntimeError(why)
        _print_once(f"megatron_pp_ext: microbatches stay in the order of the data: {why}")


def read_documents(
    inputs: StepInputs,
    data: list[list[Any] | None],
    ordering: Ordering,
    are_read: Sequence[bool] | None = None,
) -> Documents | None:
    """Read the step's microbatches into ``data``, by chunks; return the lengths of their documents.

    Of the chunks, those that ``are_read`` are read, None for all.
    """
    for iterator, is_read in zip(inputs.iterators, are_read or [True] * len(inputs.iterators), strict=True):
        data.append(_read(iterator, inputs.microbatches) if is_read else None)
    own = next((batches for batches in data if batches is not None), None)
    if own is None:
        return None
    return tuple(tuple(map(int, ordering.lengths_of(batch))) for batch in own)


def _read(iterator: Any, count: int) -> list[Any] | None:
    """Return the next ``count`` microbatches, or None on a rank that is given no data.

    RuntimeError where the data ends before.  Megatron's iterators have no more than ``__next__``.
    """
    if iterator is None:
        return None
    batches: list[Any] = []
    for _ in range(count):
        try:
            batches.append(next(iterator))
        except StopIteration:
            raise RuntimeError(
                f"the data iterator ended after {len(batches)} of the {count} microbatches of this step; "
                "give it more data, or fewer microbatches to the step"
            ) from None
    return batches


_print_once = cache(print_rank_0)
