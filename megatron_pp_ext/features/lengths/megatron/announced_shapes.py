"""Steps whose messages announce their shapes, because lengths vary and nothing says how.

The host of a rank that posts the receive of such a message stops until its sender is there.  So receives are
posted late (``schedule.late_receives``).  And where a rank has several stages, a microbatch announces its
shape to it only once, as soon as a step has shown that all stages hand on one shape.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_pp_ext.features.lengths.megatron.agreement import seen_by_any
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.runtime.channels import OtherShape, Shape
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.orders import Announced

type _Key = tuple[int, bool, Announced]


def announcing(pipeline: Pipeline) -> StepPart:
    """Return what lets messages of ``pipeline`` announce their shapes, in steps that know none.

    An order that somebody has asked to be the data's takes no shape for granted.
    """
    ordering = pipeline.request.option(Ordering)
    is_given = ordering is not None and ordering.how == "given"
    return AnnouncedShapes(may_repeat=not is_given and pipeline.placement.chunks > 1).step


class AnnouncedShapes:
    """Posts receives of announced messages late; with ``may_repeat`` it learns which can announce nothing."""

    def __init__(self, may_repeat: bool) -> None:
        self._has_one_shape: bool | None = None if may_repeat else False
        self._seen: set[bool] | None = None
        self._plans: dict[_Key, tuple[Schedule, RankPlan]] = {}

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Surround a step; one whose shapes are known is left alone.

        RuntimeError where a stage hands on another shape than the stages before it.
        """
        inputs = step.inputs
        if inputs.shape:
            yield
            return
        if self._has_one_shape is None and self._seen is not None:
            self._decide(self._seen, inputs)
        inputs.has_one_shape = bool(self._has_one_shape)
        inputs.announced = {}
        step.plan = self._plan(step)
        try:
            yield
        except OtherShape as error:
            if not inputs.has_one_shape or inputs.shapes:
                raise
            raise RuntimeError(
                f"{error}, or keep the order of the data (order='given'), whose messages all announce their "
                "shapes: in the first steps each microbatch had one shape on all stages"
            ) from error
        self._seen = _shows(inputs.announced)

    def _decide(self, seen: set[bool], inputs: StepInputs) -> None:
        """Take one shape for granted if no rank saw another; collective over those that meet."""
        if found := seen_by_any(seen, inputs):
            self._has_one_shape = False not in found

    def _plan(self, step: Step) -> RankPlan:
        """Return the plan with late receives, which is kept for the schedule's later steps."""
        announces = step.inputs.announces
        key = step.schedule.microbatches, step.inputs.forward_only, announces
        schedule, plan = self._plans.get(key, (None, None))
        if plan is None or schedule is not step.schedule:
            plan = plan_rank(step.schedule, step.plan.rank, announced=announces)
            self._plans[key] = step.schedule, plan
        return plan


def _shows(announced: Mapping[int, set[Shape]]) -> set[bool]:
    """Return whether the messages of each microbatch had one shape; nothing where all had the same."""
    if any(len(shapes) > 1 for shapes in announced.values()):
        return {False}
    return {True} if len(set().union(*announced.values())) > 1 else set()
