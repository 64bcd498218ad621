"""Training steps whose microbatches are read ahead and run in a planned order.

What microbatch k of the schedule reads is microbatch ``order[k]`` of the data, on every stage, and the losses
are handed over in the order of the data.  The schedule has its order of F and I; W go into the holes of this
step, and ranks launch by the times of its microbatches.  Evaluations are left alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pp_ext.features.lengths.megatron.agreement import Agreed, agree
from megatron_pp_ext.features.lengths.megatron.known_shapes import KnownShapes
from megatron_pp_ext.features.lengths.megatron.read_ahead import (
    Batches,
    one_item_each,
    planned,
    read_documents,
    require_read,
)
from megatron_pp_ext.features.lengths.megatron.run_costs import RunCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.lengths.plan import BUDGET, Plan, Planner
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.flushed import require_same_schedule
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule.orders import Announced
from megatron_pp_ext.schedule.unit_costs import UnitCosts
from megatron_pp_ext.schedule.without_collection import without_collection

REPLAYS = "moe_enable_routing_replay", "enable_routing_replay"
"""The names in a config, Megatron's and verl's, for routing that is replayed in the order of its record."""

SEARCHING = 0.75
"""The part of the time for a plan in which an order is searched for; costs and W take the rest."""


class Ordered:
    """Orders the steps of ``pipeline``."""

    def __init__(self, pipeline: Pipeline, ordering: Ordering) -> None:
        self.ordering, self.costs = ordering, RunCosts(pipeline, ordering)
        self._may_move = pipeline.request.from_file is None
        self._planners: dict[int, Planner] = {}
        self._shapes = KnownShapes()

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Let the step run in the planned order; evaluations are left alone.

        RuntimeError, in one line, for a loop that does not read its data as an order needs it.
        """
        inputs = step.inputs
        if inputs.forward_only:
            yield
            return
        _require_no_replay(inputs.config)
        step.may_move_weights = self.moves_weights(step)
        self.costs.learn(step)
        data: list[Batches] = []
        agreed = agree(
            lambda: read_documents(inputs, data, self.ordering),
            inputs,
            self.costs.work,
            lambda: self._shapes.known_sizes(inputs, data),
            self._shapes.are_trusted,
        )
        if agreed.unknown:
            raise RuntimeError(agreed.unknown)
        plan = self._planned(step, agreed)
        order = plan.order
        self.costs.note(inputs.training_steps, Microbatches(agreed.own).ordered(order))
        inputs.iterators = planned(inputs.iterators, data, order)
        inputs.forward_step_func = one_item_each(inputs.forward_step_func)
        announced = inputs.announces if self._shapes.are_announced(inputs, agreed) else Announced.NOTHING
        if plan.schedule is not step.schedule:
            with without_collection():
                step.plan = plan_rank(plan.schedule, step.plan.rank, announced=announced)
            require_same_schedule(plan.schedule, inputs.groups)
        with self._shapes.step(inputs, agreed, order):
            yield
        require_read(inputs.iterators, step.plan.rank == step.placement.rank_of(0))
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


def _require_no_replay(config: Any) -> None:
    """Raise RuntimeError for a config whose routing is replayed; verl's is no flag of Megatron's."""
    for name in REPLAYS:
        if getattr(config, name, False):
            raise RuntimeError(
                f"{name} in the model's config: routing is replayed in the order of its record; unset it, or "
                "leave the order out"
            )
