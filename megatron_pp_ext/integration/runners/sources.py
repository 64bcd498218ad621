"""Sources of schedules: which one the next step runs."""

from collections.abc import Hashable
from typing import Protocol

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners.free_memory import free_bytes_by_rank
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.model_vocabulary import has_frozen_output
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule


class Source(Protocol):
    """Gives the schedules of training steps.

    All ranks of the job ask in the same steps and in the same order, so it may communicate, as long as it
    does so on every rank.
    """

    def phase(self, inputs: StepInputs) -> Hashable:
        """Return a value whose change, in the same step on all ranks, asks for another schedule."""

    def schedule(self, inputs: StepInputs) -> Schedule:
        """Return the schedule of the step that is about to run, with the pipeline's placement.

        It must be the same on all ranks of the job, which compare digests.  Called once for each number of
        microbatches and ``phase``.
        """


class Requested:
    """The requested schedule; behind the first step it may be made for the memory that is free then."""

    def __init__(self, pipeline: requested.Pipeline) -> None:
        assert pipeline.source is not None
        self._source = pipeline.source
        self._measures_memory = catalog.abilities(pipeline.source.name).measures_memory

    def phase(self, inputs: StepInputs) -> Hashable:
        """See ``Source``."""
        return inputs.training_steps > 0

    def schedule(self, inputs: StepInputs) -> Schedule:
        """See ``Source``."""
        free = free_bytes_by_rank() if self._measures_memory and inputs.training_steps else None
        return self._source.schedule(inputs.microbatches, free, has_frozen_output(inputs.model))
