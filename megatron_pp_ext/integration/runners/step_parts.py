"""What features bring to the steps of a model under a schedule that flushes, and how they register."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs
from megatron_pp_ext.integration.runners.transport import Transport
from megatron_pp_ext.registered import Registered
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement


@dataclass(slots=True)
class Step:
    """A step before its stages are made.

    ``plan`` is what this rank does of ``schedule``.  A feature may set ``make_stage``, which takes what
    ``ModelStage`` takes, and add to ``parts`` what its operations work with (``rank.Rank.parts``).  It may
    set ``plan`` to another one, the same for all ranks that meet in the step.
    """

    inputs: StepInputs
    placement: Placement
    schedule: Schedule
    plan: RankPlan
    transport: Transport
    make_stage: Callable[..., ModelStage] = ModelStage
    parts: list[object] = field(default_factory=list)
    measured: Mapping[int, Sequence[Costs]] = field(default_factory=dict)
    """What microbatches have cost in measured steps (``sources.StepSource.measured``)."""
    free: Sequence[float] = ()
    """The bytes that each rank has for the step (``sources.StepSource.free``); none if not measured."""
    may_move_weights: bool = False
    """Whether W may have other places than in the schedule, here or in other replicas."""


StepPart = Callable[[Step], AbstractContextManager[None]]
"""Returns the context of a step: it changes the ``Step`` on entry, and closes what it has opened on exit."""

Make = Callable[[Pipeline], StepPart]
"""Returns what a feature brings to all steps of one runner; all ranks of the job call it at the same time."""

_registered = Registered[Make]()
register = _registered.add
"""Adds a ``Make``, which is called for every runner that is made from now on."""


def step_parts(pipeline: Pipeline) -> list[StepPart]:
    """Return what all features bring to the steps of ``pipeline``, in the order of their registration."""
    return [make(pipeline) for make in _registered]
