"""Megatron's report of theoretical memory, corrected for the running schedule.

Stock assumes 1F1B or its interleaved schedule, and a first rank with an embedding and no output layer.
"""

import copy
from argparse import Namespace
from collections.abc import Callable

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate

_REPORT, _WHY = "megatron.training.theoretical_memory_usage", "a true report of theoretical memory"
_ACTIVATIONS = "args num_microbatches verbose"


@hook(f"{_REPORT}:compute_activation_memory", _ACTIVATIONS, _WHY)
@hook(f"{_REPORT}:compute_activation_memory_without_sp", _ACTIVATIONS, _WHY)
def activations_as_scheduled(
    stock: Callable[..., float], args: Namespace, num_microbatches: int | None, verbose: bool = False
) -> float:
    """Count the microbatches that the schedule has in flight on its fullest rank; bytes."""
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.source is None or num_microbatches is None:
        return stock(args, num_microbatches, verbose)
    schedule = pipeline.source.schedule(num_microbatches)
    in_flight = max(simulate(schedule, Costs.unit(schedule.placement)).peak_microbatches)
    # Without chunks and a number of microbatches, stock counts as many microbatches as ranks.
    unscheduled = copy.copy(args)
    unscheduled.virtual_pipeline_model_parallel_size = None
    as_1f1b = stock(unscheduled, None, verbose)
    if verbose:
        print(f"Number of in-flight microbatches under {pipeline.name}: {in_flight:g}")
    return as_1f1b * in_flight / args.pipeline_model_parallel_size


@hook(f"{_REPORT}:compute_weight_and_optimizer_memory", "args verbose", _WHY)
def weights_of_embedding_and_head(
    stock: Callable[..., float], args: Namespace, verbose: bool = False
) -> float:
    """Count the output layer where a V puts it: on the rank with the embedding; bytes."""
    memory = stock(args, verbose)
    pipeline = requested.pipeline()
    if pipeline is None or not pipeline.has_embedding_with_head:
        return memory
    if verbose:
        print(f"Under {pipeline.name} the most loaded shard has the output layer, too")
    # A second matrix of the embedding's size, tied or not.
    doubled = copy.copy(args)
    doubled.padded_vocab_size *= 2
    return stock(doubled, False)
