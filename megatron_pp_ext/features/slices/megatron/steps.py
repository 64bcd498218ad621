"""What slices bring to the steps of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatron_pp_ext.features.slices.megatron.layers import Calls
from megatron_pp_ext.features.slices.megatron.sliced_stage import SlicedStage
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart


def sliced(pipeline: Pipeline) -> StepPart:
    """Return what slices bring to the steps of ``pipeline``; nothing where none are requested."""
    option = pipeline.request.option(Slices)
    calls: list[Calls] = []

    @contextmanager
    def during(step: Step) -> Iterator[None]:
        if option is not None and option.count > 1:
            inputs = step.inputs
            calls[:] = calls or map(Calls, inputs.model)
            units = option.units(inputs.microbatches)
            inputs.shape = (inputs.shape[0] // option.count, *inputs.shape[1:])
            step.make_stage = partial(SlicedStage, units=units, calls=calls)
        yield

    return during
