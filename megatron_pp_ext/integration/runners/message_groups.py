"""The process groups and channels of a pipeline's messages, made as Megatron's flags request them."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.groups import MAX_CTAS, GroupOptions, collective_group, direction_groups
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges

type Directions = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The groups of messages to a higher and to a lower pipeline rank."""

PIPELINE = "pp"
"""The name of pipeline groups in Megatron's flags and files; their settings hold for ours too."""


def device() -> torch.device:
    """Return the device of Megatron's tensors on this rank."""
    return torch.device("cuda", torch.cuda.current_device())


def message_groups(ranks: list[int], edges: Iterable[tuple[int, int]] = ()) -> Directions:
    """Make the groups, down and up, for messages between the global ``ranks`` of a pipeline.

    ``edges`` are pairs of pipeline ranks that exchange messages beside neighbours.  Collective over the whole
    world, at a time when no message is on its way.
    """
    patience, options = _as_flags_say()
    return direction_groups(ranks, patience, options=options, edges=edges)


def vocabulary_exchanges(group: dist.ProcessGroup) -> Exchanges:
    """Make the exchanges of a vocabulary that the ranks of the pipeline ``group`` share.

    Their groups are of these ranks, and of all ranks with rows, which are those of the other tensor-parallel
    ranks too.

    Collective over the whole world, at a time when no message is on its way.
    """
    patience, options = _as_flags_say()
    pipeline, everyone = (
        collective_group(dist.get_process_group_ranks(ranks), patience, options=options)
        for ranks in (group, parallel_state.get_model_parallel_group())
    )
    return Exchanges(pipeline, everyone)


def _as_flags_say() -> tuple[timedelta, GroupOptions]:
    args = get_args()
    return timedelta(minutes=args.distributed_timeout_minutes), group_options(args)


def message_channels(ranks: list[int], directions: Directions, shape: Any, config: Any) -> Channels:
    """Make channels between the global ``ranks`` of a pipeline for messages of ``shape``."""
    return Channels(ranks, *directions, shape, config.pipeline_dtype, device())


def group_options(args: Any) -> GroupOptions:
    """Return the options for NCCL: what the user sets for Megatron's pipeline groups, else our defaults.

    As in Megatron (``parallel_state.initialize_model_parallel``), a group that is named in
    ``--high-priority-stream-groups`` has a high priority whatever the file of
    ``--nccl-communicator-config-path`` sets.
    """
    given: dict[str, Any] = {}
    if args.nccl_communicator_config_path is not None:
        import yaml  # type: ignore[import-untyped]  # as in Megatron, only where there is such a file

        settings = yaml.safe_load(Path(args.nccl_communicator_config_path).read_text())
        given = dict(settings.get(PIPELINE) or {})
    if PIPELINE in (args.high_priority_stream_groups or ()):
        given["is_high_priority_stream"] = True
    if "min_ctas" in given:
        given.setdefault("max_ctas", max(MAX_CTAS, given["min_ctas"]))
    return GroupOptions(**{name: given[name] for name in GroupOptions.__slots__ if name in given})
