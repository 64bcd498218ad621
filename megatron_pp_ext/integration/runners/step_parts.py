"""What features bring to the steps of a model under a schedule that flushes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs
from megatron_pp_ext.integration.runners.transport import Transport
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
    """What microbatches have cost in measured steps (``sources.Source.measured``)."""
    free: Sequence[float] = ()
    """The bytes that each rank has for the step (``sources.Source.free``); none if not measured."""
    may_move_weights: bool = False
    """Whether W may have other places than in the schedule, here or in other replicas."""


StepPart = Callable[[Step], AbstractContextManager[None]]
"""Returns the context of a step: it changes the ``Step`` on entry, and closes what it has opened on exit."""


def step_parts(pipeline: Pipeline) -> list[StepPart]:
    """Return what all features bring to the steps of ``pipeline``, in the order in which they are entered."""
    return [
        *(part for feature in FEATURES for part in feature.data_parts(pipeline)),
        *(part for feature in FEATURES for part in feature.step_parts(pipeline)),
    ]
