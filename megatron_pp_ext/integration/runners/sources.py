"""Sources of schedules: which one the next step runs."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from megatron_pp_ext.compiler.request import Option
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners.free_memory import free_bytes_by_rank
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.pipeline_runner import Recording
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs


class Source(Protocol):
    """Gives the schedules of training steps.

    All ranks of a pipeline ask in the same steps and in the same order, so it may communicate, as long as it
    does so on every rank.  Pipelines may have other numbers of microbatches than their replicas.
    """

    def phase(self, inputs: StepInputs) -> Hashable:
        """Return a value whose change, in the same step on all ranks, asks for another schedule."""

    def schedule(self, inputs: StepInputs) -> Schedule:
        """Return the schedule of the step that is about to run, with the pipeline's placement.

        It must be the same on all ranks of the pipeline, which compare digests.  Called once for each number
        of microbatches and ``phase``.
        """

    def ordinary(self, inputs: StepInputs) -> Schedule | None:
        """Return the schedule of a step with the ordinary number of microbatches; None if this step has it.

        It is the same on all ranks of the job, whatever number each of them runs.
        """

    @property
    def measured(self) -> Mapping[int, Sequence[Costs]]:
        """What each microbatch has cost in the steps that were measured so far, the same on all ranks.

        Steps go by the number of training steps that the process had run before.
        """

    @property
    def free(self) -> Sequence[float]:
        """The bytes that each rank has for activations and messages of a step, where they were measured."""


class Requested:
    """The requested schedule; after the first step it may be made for the memory that is free then."""

    def __init__(self, pipeline: requested.Pipeline) -> None:
        assert pipeline.source is not None
        self._source = pipeline.source
        self._measures_memory = catalog.abilities(pipeline.source.name).measures_memory
        self._ordinary = pipeline.request.microbatches
        self._free_bytes: Sequence[float] = ()

    def phase(self, inputs: StepInputs) -> Hashable:
        return inputs.training_steps > 0

    def schedule(self, inputs: StepInputs) -> Schedule:
        return self._schedule(inputs.microbatches, inputs)

    def ordinary(self, inputs: StepInputs) -> Schedule | None:
        return None if inputs.microbatches == self._ordinary else self._schedule(self._ordinary, inputs)

    @property
    def measured(self) -> Mapping[int, Sequence[Costs]]:
        return {}

    @property
    def free(self) -> Sequence[float]:
        return self._free_bytes

    def _schedule(self, microbatches: int, inputs: StepInputs) -> Schedule:
        free = self._measured_once() if self._measures_memory and inputs.training_steps else None
        return self._source.schedule(microbatches, free, model_options(inputs.model))

    def _measured_once(self) -> Sequence[float]:
        """Return the free bytes of each pipeline rank, measured in the second training step.

        All ranks of the job build a schedule in that step.  In later ones replicas may come alone, with a
        number of microbatches that others have not or know already.
        """
        self._free_bytes = self._free_bytes or free_bytes_by_rank()
        return self._free_bytes


def model_options(model: Sequence[Any]) -> tuple[Option, ...]:
    """Return the options that features read off the chunks of ``model``."""
    return tuple(filter(None, (feature.model_option(model) for feature in FEATURES)))


class Guide(Source, Recording, Protocol):
    """A source whose schedules follow from what it records of the steps before."""


def guide_of(pipeline: requested.Pipeline) -> Guide | None:
    """Return the guide of the first feature that has one for ``pipeline``, or None."""
    return next(filter(None, (feature.guide(pipeline) for feature in FEATURES)), None)
