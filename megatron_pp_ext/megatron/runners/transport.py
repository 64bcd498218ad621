"""What carries messages, collectives and losses between the ranks of a pipeline."""

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_pp_ext.files import read_text
from megatron_pp_ext.megatron.requested import PIPELINE, Settings
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.channels import Channels, Shape
from megatron_pp_ext.runtime.groups import MAX_CTAS, GroupOptions, collective_group, direction_groups
from megatron_pp_ext.schedule.placement import Placement

if TYPE_CHECKING:
    from megatron_pp_ext.runtime.object_send import ObjectSend

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
    shared = sequence_ranks(inputs)
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
    shared = sequence_ranks(inputs)
    return [(rows, tokens * shared) for tokens, rows, *_ in shapes]


def sequence_ranks(inputs: StepInputs) -> int:
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


class Transport(Protocol):
    """Connects this rank with the others of its pipeline, or is their stub where it ``is_alone``."""

    is_alone: bool

    def channels(self, inputs: StepInputs) -> Channels:
        """Return the channels of one step."""

    def groups(self, feature: str, *like: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        """Return groups that carry only the collectives of ``feature``, each among the ranks of one ``like``.

        The first call for a feature makes them: it is collective over the whole world, at a time when no
        message is on its way.
        """


class ProcessGroups:
    """Messages over process groups of their own, which the first call makes; a ``Transport``.

    That call is collective over the whole world, at a time when no message is on its way.
    """

    is_alone = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directions: Directions | None = None
        self._groups: dict[str, tuple[dist.ProcessGroup, ...]] = {}
        self._last: Channels | None = None

    def directions(self, group: dist.ProcessGroup) -> Directions:
        """Return the process groups, down and up, of the messages in ``group``."""
        if self._directions is None:
            self._directions = message_groups(self._settings, dist.get_process_group_ranks(group))
        return self._directions

    def channels(self, inputs: StepInputs) -> Channels:
        """See ``Transport``; RuntimeError where the step before failed, whose messages are still there."""
        if self._last is not None and not self._last.is_closed:
            raise RuntimeError(
                "no step can follow one that failed: its messages may be on their way, and this step would "
                "take them for its own; end all ranks, and go on from a checkpoint"
            )
        ranks = dist.get_process_group_ranks(inputs.group)
        self._last = message_channels(ranks, self.directions(inputs.group), inputs)
        return self._last

    def groups(self, feature: str, *like: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        if feature not in self._groups:
            options, timeout = group_options(self._settings), self._settings.timeout
            self._groups[feature] = tuple(
                collective_group(dist.get_process_group_ranks(group), feature, timeout, options=options)
                for group in like
            )
        return self._groups[feature]


class LossesOnLastRank:
    """The loss store of a step where stock has it; ``pipeline_runner.Losses``.

    Where another rank computes the losses, they travel to the last one with the messages down the pipeline.

    Under a V the last stage may be on the pipeline's first rank.  Megatron logs losses, and the losses of
    multi-token prediction, from the last rank, and divides gradients by the count of tokens that it finds
    there.
    """

    def __init__(self, placement: Placement, transport: ProcessGroups) -> None:
        self._holder = placement.rank_of(placement.stages - 1)
        self._reader = placement.ranks - 1
        self._transport = transport
        self._object_send: ObjectSend | None = None

    def tokens(self, inputs: StepInputs) -> torch.Tensor:
        tokens, rank, connection = inputs.tokens, inputs.group.rank(), self._connection(inputs)
        if connection is not None and rank == self._holder:
            dist.send(tokens.to(connection.wire), connection.receiver, group=connection.group)
        elif connection is not None and rank == self._reader:
            received = torch.empty_like(tokens, device=connection.wire)
            dist.recv(received, connection.sender, group=connection.group)
            return received.to(tokens.device)
        return tokens

    def losses(self, inputs: StepInputs) -> list[Any]:
        """See ``pipeline_runner.Losses``.

        The losses of MTP move into the last rank's tracker.
        """
        rank, connection = inputs.group.rank(), self._connection(inputs)
        if connection is None:
            return inputs.losses
        if rank == self._holder:
            connection.send(losses=inputs.losses, mtp_losses=_take_mtp_losses())
        elif rank == self._reader:
            received = connection.receive()
            _put_mtp_losses(received["mtp_losses"])
            return list(received["losses"])
        return []

    def _connection(self, inputs: StepInputs) -> "ObjectSend | None":
        """Return the connection that brings losses to the last rank; None if that computes them itself."""
        if self._holder != self._reader and self._object_send is None:
            down, _ = self._transport.directions(inputs.group)
            ranks = dist.get_process_group_ranks(inputs.group)
            from megatron_pp_ext.runtime.object_send import ObjectSend

            self._object_send = ObjectSend(ranks[self._holder], ranks[self._reader], down, device())
        return self._object_send


def _take_mtp_losses() -> dict[str, torch.Tensor]:
    """Remove from this rank's tracker the sums since the last log entry, and return them."""
    tracker = MTPLossLoggingHelper.tracker
    sums = [name for name, value in tracker.items() if isinstance(value, torch.Tensor)]
    return {name: tracker.pop(name) for name in sums}


def _put_mtp_losses(sums: dict[str, torch.Tensor]) -> None:
    """Make ``sums`` this rank's, to be averaged over the data-parallel ranks of its stage."""
    if sums:
        average_over = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(sums, avg_group=average_over)
