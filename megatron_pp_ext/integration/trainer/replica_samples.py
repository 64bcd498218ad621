"""Megatron's counting of ranks and samples, for stages with different numbers of replicas.

The number of samples in a step cannot go by the number of replicas, which differs by stage.  Megatron counts
a single data-parallel rank, with all microbatches of a step, and each replica's sampler takes every r-th of
them, which are the ones that the schedule gives it (``schedule.families.round_robin``).
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state

from megatron_pp_ext.around import bound
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core.replicated_ranks import replicated
from megatron_pp_ext.integration.patching import hook


@contextmanager
def one_of_each(args: Namespace, pipeline: requested.Pipeline | None) -> Iterator[None]:
    """Let Megatron's validation see as many ranks as one replica of each stage has.

    From the number of ranks it derives the data-parallel size, and from that the microbatches of a step.
    """
    ranks = args.world_size
    if pipeline is not None and replicated(pipeline):
        args.world_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    try:
        yield
    finally:
        args.world_size = ranks


@hook(
    "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__init__",
    "self total_samples consumed_samples micro_batch_size data_parallel_rank data_parallel_size drop_last",
    "microbatches that the replicas of a stage take in turn",
)
def take_turns(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let one of a stage's r replicas read every r-th microbatch.

    Megatron gives the rank among the replicas, and 1 for their number.
    """
    call = bound(stock, *args, **kwargs)
    if replicated():
        call.arguments["data_parallel_size"] = parallel_state.get_data_parallel_group().size()
    stock(*call.args, **call.kwargs)
