"""What an order of microbatches brings to the steps of a model."""

from megatron_pp_ext.features.lengths.megatron.first_step import FirstStep, as_given
from megatron_pp_ext.features.lengths.megatron.ordered_data import Ordered
from megatron_pp_ext.features.lengths.megatron.within_limit import WithinLimit
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.step_parts import StepPart


def ordered(pipeline: Pipeline) -> StepPart:
    """Return what orders the data of steps, as the request asks, unless another feature does."""
    request = pipeline.request
    ordering = request.option(Ordering)
    is_others = any(option.orders_lengths for option in request.options)
    if ordering is None or ordering.how == "given" or is_others:
        return as_given
    make = WithinLimit if request.is_compiled else Ordered
    if ordering.is_watched:
        return FirstStep(ordering, lambda *seen: make(pipeline, ordering, *seen).step).step
    return make(pipeline, ordering).step
