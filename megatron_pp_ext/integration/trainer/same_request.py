"""The hook that compares the requests of a job's ranks before any process group is made."""

import hashlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from megatron_pp_ext import version
from megatron_pp_ext.around import bound
from megatron_pp_ext.files import read_bytes
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.trainer.agreement import require_agreement
from megatron_pp_ext.job.our_flags import add_flags
from megatron_pp_ext.schedule.names import CSV_PREFIX

_READ = ("pipeline_costs",)
"""The arguments that name files to read; other files are written, on ranks that may each have their own."""


_PARAMETERS = "get_embedding_ranks get_position_embedding_ranks store"


@hook(
    "megatron.training.initialize:_initialize_distributed",
    (_PARAMETERS, f"{_PARAMETERS} skip_model_parallel_init"),
    "one schedule, from the same flags and files, on all ranks of the job",
)
def compare_before_groups(stock: Callable[..., Any], *sizes: Any, **kwargs: Any) -> Any:
    """Compare the pipelines that were requested of all ranks, then let Megatron make its process groups."""
    args = get_args()
    # A script may have made the default process group by itself; the ranks of a rehearsal run alone.
    if args.world_size > 1 and not args.fake_process_group and not dist.is_initialized():
        patience = timedelta(minutes=args.distributed_timeout_minutes)
        store = bound(stock, *sizes, **kwargs).arguments["store"]
        require_agreement(values(args, requested.pipeline()), patience, store)
    return stock(*sizes, **kwargs)


def values(args: Namespace, pipeline: requested.Pipeline | None) -> dict[str, str]:
    """Return the values that have to be the same on all ranks, by the words of an error about them.

    Files go by their content, since each machine may have its own copy, and files to write by whether they
    are given.
    """
    shared = {"megatron_pp_ext is": version.VERSION}
    for action in add_flags(ArgumentParser(add_help=False))._actions:
        value = getattr(args, action.dest)
        if value is None or value is False:
            continue
        spelled = "given" if value is True or isinstance(value, Path) else str(value)
        shared[f"{action.option_strings[0]} is"] = CSV_PREFIX if spelled.startswith(CSV_PREFIX) else spelled
        if action.dest in _READ:
            shared[f"the content of {action.option_strings[0]} has the digest"] = _digest(value)
    if args.pipeline_model_parallel_layout is not None:
        shared["--pipeline-model-parallel-layout is"] = str(args.pipeline_model_parallel_layout)
    if pipeline is None:
        return shared
    request, placement = pipeline.request, pipeline.placement
    chunks = f"{placement.chunks} chunk{'s' * (placement.chunks > 1)}"
    ends = ", embedding and output head on the last rank" if placement.ends_on_last else ""
    shared["the placement is"] = f"{placement.shape}, {placement.ranks} ranks x {chunks}{ends}"
    shared["the data-parallel size is"] = str(request.data)
    shared["the microbatches of a step are"] = str(request.microbatches)
    if request.layers is not None:
        shared["the stages have"] = f"{', '.join(map(str, request.layers))} layers"
    if pipeline.source is not None:
        shared["the schedule's digest is"] = pipeline.source.ordinary.digest[:12]
    return shared


def _digest(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()[:12]
