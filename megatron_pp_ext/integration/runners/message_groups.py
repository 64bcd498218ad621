"""The process groups and channels of a pipeline's messages, made by the run's settings."""

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules

from megatron_pp_ext.files import read_text
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.settings import PIPELINE, Settings
from megatron_pp_ext.runtime.channels import Channels, Shape
from megatron_pp_ext.runtime.groups import MAX_CTAS, GroupOptions, direction_groups

type Directions = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The groups of messages to a higher and to a lower pipeline rank."""


def device() -> torch.device:
    """Return the device of Megatron's tensors on this rank."""
    return torch.device("cuda", torch.cuda.current_device())


def message_groups(settings: Settings, ranks: list[int], edges: Iterable[tuple[int, int]] = ()) -> Directions:
    """Make the groups, down and up, for messages between the global ``ranks`` of a pipeline.

    ``edges`` are pairs of pipeline ranks that exchange messages in addition to neighbours.  Collective over
    the whole world, at a time when no message is on its way.
    """
    return direction_groups(ranks, settings.timeout, options=group_options(settings), edges=edges)


def message_channels(ranks: list[int], directions: Directions, inputs: StepInputs) -> Channels:
    """Make channels between the global ``ranks`` of a pipeline for the messages of a step."""
    return Channels(
        ranks,
        *directions,
        inputs.shape,
        inputs.config.pipeline_dtype,
        device(),
        inputs.shapes,
        inputs.announced,
        inputs.has_one_shape,
    )


def shapes_of(inputs: StepInputs, sizes: Iterable[tuple[int, int]]) -> tuple[Shape, ...]:
    """Return the shapes of messages whose units have ``sizes``: so many sequences of so many tokens each.

    They are stock's shapes where all lengths are equal, which are not announced.  Empty where the ranks that
    share sequences cannot share one of these evenly.
    """
    config, groups = copy(inputs.config), inputs.groups
    config.variable_seq_lengths = False
    shared = _sharing(inputs)
    ((_, _, *dimensions),) = stock_schedules.get_tensor_shapes(
        seq_length=shared,
        micro_batch_size=1,
        decoder_seq_length=None,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    sizes = tuple(sizes)
    if any(tokens % shared for _, tokens in sizes):
        return ()
    return tuple((tokens // shared, rows, *dimensions) for rows, tokens in sizes)


def sizes_of(inputs: StepInputs, shapes: Iterable[Shape]) -> list[tuple[int, int]]:
    """Return how many sequences units have whose messages have ``shapes``, and of how many tokens each."""
    shared = _sharing(inputs)
    return [(rows, tokens * shared) for tokens, rows, *_ in shapes]


def _sharing(inputs: StepInputs) -> int:
    """Return how many ranks share each sequence of a message."""
    groups = inputs.groups
    return int(groups.cp.size() * (groups.tp.size() if inputs.config.sequence_parallel else 1))


def group_options(settings: Settings) -> GroupOptions:
    """Return the NCCL options that the user sets for Megatron's pipeline groups, else our defaults.

    As in Megatron (``parallel_state.initialize_model_parallel``), a group that is named for a high priority
    has it whatever the file of communicators sets.
    """
    options: dict[str, Any] = {}
    if settings.communicators is not None:
        import yaml  # type: ignore[import-untyped]  # as in Megatron, only where there is such a file

        options = dict(yaml.safe_load(read_text(settings.communicators)).get(PIPELINE) or {})
    if settings.has_priority:
        options["is_high_priority_stream"] = True
    if "min_ctas" in options:
        options.setdefault("max_ctas", max(MAX_CTAS, options["min_ctas"]))
    return GroupOptions(**{name: options[name] for name in GroupOptions.__slots__ if name in options})
