"""Shapes of messages where lengths vary: those that follow from the batches, and those that are announced.

A loop may pad what it reads, or put something between.  So a step whose messages announce their shapes shows
first whether all of them follow from the tensors that were read; then those of later steps are taken to do so
too, on all ranks of the pipeline.

The host of a rank that posts the receive of an announced message stops until its sender is there.  So such
receives are posted late (``schedule.late_receives``).  And where a rank has several stages, a microbatch
announces its shape to it only once, as soon as a step has shown that all stages hand on one shape.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp_ext.features.units.megatron.agreement import Agreed, Sizes, seen_by_any
from megatron_pp_ext.features.units.options import Ordering
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.message_groups import shapes_of
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.runtime.channels import OtherShape, Shape
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.orders import Announced

_ROWS = "tokens", "input_ids", "labels", "position_ids"
"""The names of tensors with a row for each sequence, and a column for each token."""


class KnownShapes:
    """Hands over the shapes of messages ahead, once a step has shown that they follow from batches."""

    def __init__(self) -> None:
        self._follow: bool | None = None

    @property
    def are_trusted(self) -> bool:
        """Whether this rank has seen that shapes follow from batches."""
        return bool(self._follow)

    @staticmethod
    def known_sizes(inputs: StepInputs, data: Sequence[Sequence[Any] | None]) -> Sizes:
        """Return the sizes of a step's microbatches, as ``sizes_of``; empty where they tell no shapes."""
        sizes = sizes_of(data)
        return sizes if shapes_of(inputs, sizes) else ()

    @staticmethod
    def are_announced(inputs: StepInputs, agreed: Agreed) -> bool:
        """Return whether messages of a step announce their shapes."""
        return not inputs.shape and not agreed.are_trusted

    @contextmanager
    def step(self, inputs: StepInputs, agreed: Agreed, order: Sequence[int]) -> Iterator[None]:
        """Surround a step whose microbatches run in this ``order``.

        RuntimeError where a stage makes a message of another shape than was handed over.
        """
        followed = () if inputs.shape else shapes_of(inputs, agreed.sizes)
        shapes = [followed[number] for number in order] if followed else []
        if not self.are_announced(inputs, agreed):
            inputs.shapes = shapes
        try:
            yield
        except OtherShape as error:
            if not inputs.shapes:
                raise
            raise RuntimeError(
                f"{error}, or keep the order of the data (order='given'), whose messages announce their "
                "shapes: in the first steps all shapes followed from the batches"
            ) from error
        if shapes and self._follow is None and inputs.announced is not None:
            self._learn(inputs.announced, shapes)

    def _learn(self, announced: Mapping[int, set[Shape]], shapes: Sequence[Shape]) -> None:
        """Compare what a step has announced; equal shapes tell nothing of how others would be padded."""
        if announced != {number: {shape} for number, shape in enumerate(shapes)}:
            self._follow = False
        elif len(set(shapes)) > 1:
            self._follow = True


def sizes_of(data: Sequence[Sequence[Any] | None]) -> Sizes:
    """Return the sizes of the microbatches of a step, from the ``data`` of each chunk that reads some."""
    own = next((batches for batches in data if batches is not None), ())
    sizes = [size_of(batch) for batch in own]
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


def size_of(batch: Any) -> tuple[int, int] | None:
    """Return how many sequences a batch has, and of how many tokens each; None where it has no such rows."""
    for name in _ROWS if isinstance(batch, Mapping) else ():
        found = batch.get(name)
        if isinstance(found, torch.Tensor) and found.dim() == 2 and not found.is_nested:
            rows, tokens = found.shape
            return rows, tokens
    return None


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
