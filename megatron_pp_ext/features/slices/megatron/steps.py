"""What slices bring to the steps of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.slices.megatron.by_length import ByLength
from megatron_pp_ext.features.slices.megatron.layers import Calls
from megatron_pp_ext.features.slices.megatron.probe import require_known_operations
from megatron_pp_ext.features.slices.megatron.sliced_stage import SlicedStage
from megatron_pp_ext.features.slices.options import Slices, Unchecked, are_by_length
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.setting_error import SettingError


def sliced(pipeline: Pipeline, option: Slices) -> StepPart:
    """Return what the slices of ``option`` bring to the steps of ``pipeline``."""
    is_checked = pipeline.request.option(Unchecked) is None
    if are_by_length(pipeline.request):
        ordering = pipeline.request.option(Ordering)
        assert ordering is not None
        return ByLength(pipeline, option, ordering).step
    calls: list[Calls] = []

    @contextmanager
    def during(step: Step) -> Iterator[None]:
        if option.count == 1:
            yield
        else:
            inputs = step.inputs
            calls[:] = calls or map(Calls, inputs.model)
            _require_length(inputs, option)
            assert option.tokens is not None
            require_known_operations(calls, inputs, option.tokens, is_checked)
            units = option.units(inputs.microbatches)
            inputs.shape = (inputs.shape[0] // option.count, *inputs.shape[1:])
            step.make_stage = partial(SlicedStage, units=units, calls=calls)
            yield

    return during


def _require_length(inputs: StepInputs, option: Slices) -> None:
    """Raise ValueError unless the step's sequences have the length that its schedule was made for."""
    ((length,),) = option.units(1).documents
    tensor = inputs.groups.tp.size() if inputs.config.sequence_parallel else 1
    if inputs.config.variable_seq_lengths or inputs.shape[0] * tensor != length:
        raise SettingError(
            f"slices were planned for sequences of {length} tokens, and this step has others; give all steps "
            "this length, let --pipeline-order rule plan each step, or leave out --pipeline-slice-tokens"
        )
