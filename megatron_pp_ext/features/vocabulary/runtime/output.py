"""A rank's part of an output layer that all ranks of a pipeline share (arXiv 2411.05288, algorithm 2)."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges, Rows, SharedEmbedding
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.messages import Exchange, Exchanged

_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The ranks of ``group``, each of which has a pipeline of its own, with other rows of the weight.

    Under sequence parallelism the last stage's output is cut into ``parts`` by tokens, in the ranks' order;
    else every rank has all of it.  Without a group there is no tensor parallelism.
    """

    group: dist.ProcessGroup | None = None
    parts: int = 1

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all tokens, gathered from each rank's part of the stage's output."""
        if self.parts == 1:
            return hidden
        whole = hidden.new_empty(hidden.shape[0] * self.parts, *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden, group=self.group)
        return whole

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of all tokens over the group, and return this rank's part."""
        if self.group is None:
            return gradient
        if self.parts == 1:
            dist.all_reduce(gradient, group=self.group)
            return gradient
        part = gradient.new_empty(gradient.shape[0] // self.parts, gradient.shape[1])
        dist.reduce_scatter_tensor(part, gradient, group=self.group)
        return part


ALONE = TensorRanks()
"""No tensor parallelism."""


class LossHead(Protocol):
    """The labels and the loss, on the rank with the last stage."""

    def labels(self, microbatch: int) -> torch.Tensor:
        """Return the label of every token, as numbers of rows of the whole weight."""

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        """Take the loss of every token, and return the gradient of each."""


@dataclass
class _MicrobatchLogits:
    """A microbatch's tensors on a rank; each has a row, or a number, for each token.

    ``exponentials`` are P, with 0 for the label; ``statistics`` are m, l and the label's logit, 0 where
    another rank has it, and ``of_all`` those of all ranks.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    exponentials: torch.Tensor = _NONE
    part: torch.Tensor = _NONE
    statistics: torch.Tensor = _NONE
    of_all: torch.Tensor = _NONE
    loss_gradient: torch.Tensor = _NONE
    under_way: dict[Exchanged, list[dist.Work]] = field(default_factory=dict)

    def wait(self, exchange: Exchanged) -> None:
        """Let later computation wait for an exchange."""
        for work in self.under_way.pop(exchange, ()):
            work.wait()


class SharedOutput:
    """The part of this rank: ``rows`` of the output weight.

    The last stage's output has ``shape``, ... x hidden, with the weight's type and device.  ``home`` is the
    rank of the pipeline that holds the last stage, and there ``head`` is given.  All ranks launch the
    ``exchanges`` in one order, the plan's (``schedule.messages``).  An evaluation has losses, and nothing
    else.  ``completing`` makes a context around the last T of the step, of ``gradients``, which completes the
    weight's gradient.

    Rank r holds some rows of the output weight.  For each token, with its logits y over these rows,

        S    m = max(y),  P = exp(y - m),  l = sum(P),  A = P @ weight, the label's row left out
        T    gradient of the weight += g * (softmax - one-hot) of the token, times its hidden state

    From the m and l of all ranks come M = max(m) and L = sum(l * exp(m - M)).  The loss of the token is M +
    log(L) less the logit of its label, which one rank has, and the softmax is P * exp(m - M) / L.  The
    gradient of the hidden state is the sum over the ranks of A * exp(m - M) / L, plus the label's row times
    its softmax less 1: that row is added by itself, so that nothing cancels where the model is sure.  All of
    it is multiplied by g, the gradient of the token's loss.  Frozen rows have no T, and no rank has to know g
    for it.
    """

    def __init__(
        self,
        rows: Rows,
        shape: torch.Size,
        exchanges: Exchanges,
        home: int,
        head: LossHead | None = None,
        tensor_ranks: TensorRanks = ALONE,
        is_evaluation: bool = False,
        completing: Callable[[], AbstractContextManager[None]] = nullcontext,
        gradients: int = 0,
    ) -> None:
        self._is_evaluation = is_evaluation
        self._completing, self._gradients_left = completing, gradients
        self._rows, self._shape, self._head = rows, shape, head
        self._exchanges, self._home, self._tensor_ranks = exchanges, home, tensor_ranks
        self._kept: dict[int, _MicrobatchLogits] = {}
        self._type = torch.float32

    @property
    def _tokens(self) -> int:
        """The number of tokens of a microbatch, of which the output may have a part here."""
        return self._tensor_ranks.parts * math.prod(self._shape[:-1])

    def keep(self, microbatch: int, hidden: torch.Tensor) -> None:
        """Take the last stage's output on the rank that computed it, for the exchange."""
        assert self._head is not None
        labels = self._head.labels(microbatch).reshape(-1)
        self._type = hidden.dtype  # Megatron hands on 32 bits where the model has 16
        hidden = hidden.detach().to(self._rows.weight().dtype)
        self._kept[microbatch] = _MicrobatchLogits(hidden.contiguous(), labels)

    def launch(self, exchange: Exchange) -> None:
        """Begin an exchange; later computation does not wait for it."""
        if exchange.what is Exchanged.LOSS and not self._rows.takes_gradient:
            self._ended(exchange.microbatch)
            return
        begin = {
            Exchanged.HIDDEN: self._broadcast_hidden,
            Exchanged.STATISTICS: self._gather_statistics,
            Exchanged.GRADIENT: self._reduce_gradient,
            Exchanged.LOSS: self._broadcast_loss,
        }[exchange.what]
        works = begin(exchange.microbatch)
        self._kept[exchange.microbatch].under_way[exchange.what] = works

    def logits(self, microbatch: int) -> None:
        """S: compute this rank's logits, their statistics for all ranks, and its part of the gradient."""
        state = self._kept[microbatch]
        state.wait(Exchanged.HIDDEN)
        state.hidden = self._tensor_ranks.gather(state.hidden).flatten(0, -2)
        weight = self._rows.weight().detach()
        # Logits are summed in no less than single precision.
        logits = (state.hidden @ weight.t()).to(torch.promote_types(weight.dtype, torch.float32))
        is_local, row = self._held(state.labels)
        label = logits.gather(1, row) * is_local
        largest = logits.max(dim=1, keepdim=True).values
        exponentials = logits.sub_(largest).exp_()
        state.statistics = torch.stack([largest, exponentials.sum(dim=1, keepdim=True), label])
        if self._is_evaluation:
            state.hidden = _NONE
            return
        exponentials.scatter_(1, row, exponentials.gather(1, row) * ~is_local)
        state.exponentials = exponentials.to(weight.dtype)
        state.part = state.exponentials @ weight
        if not self._rows.takes_gradient:
            state.hidden = state.exponentials = _NONE  # They are for T.
        if STORE.meter is not None:
            for tensor in (state.hidden, state.exponentials, state.part):
                STORE.meter.hold(None, tensor, holder=state)

    def output_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output on the rank that computed it."""
        state = self._kept[microbatch]
        state.wait(Exchanged.GRADIENT)
        state.loss_gradient = self._lose(microbatch, state).to(state.statistics.dtype)
        gradient = (state.part * state.loss_gradient).to(state.part.dtype)
        return self._tensor_ranks.reduce(gradient).view(self._shape).to(self._type)

    def weight_gradient(self, microbatch: int) -> None:
        """T: add the microbatch's gradient to this rank's rows."""
        state = self._ended(microbatch)
        scale, of_label = self._softmax(state)
        _, row = self._held(state.labels)
        difference = state.exponentials * scale
        difference.scatter_add_(1, row, of_label)
        difference *= state.loss_gradient
        self._gradients_left -= 1
        with nullcontext() if self._gradients_left else self._completing():
            self._rows.add_gradient(difference.to(state.hidden.dtype).t() @ state.hidden)

    def _ended(self, microbatch: int) -> _MicrobatchLogits:
        """Take out a microbatch, whose exchanges are over."""
        state = self._kept.pop(microbatch)
        for exchange in tuple(state.under_way):
            state.wait(exchange)
        return state

    def close(self) -> None:
        """End a step; microbatches of an evaluation still have to deliver their losses to the head."""
        for microbatch in sorted(self._kept):
            state = self._ended(microbatch)
            if self._head is not None:
                self._lose(microbatch, state)

    def _broadcast_hidden(self, microbatch: int) -> list[dist.Work]:
        if self._head is None:
            weight = self._rows.weight()
            hidden = torch.empty(self._shape, dtype=weight.dtype, device=weight.device)
            labels = torch.empty(self._tokens, dtype=torch.long, device=weight.device)
            self._kept[microbatch] = _MicrobatchLogits(hidden, labels)
        state = self._kept[microbatch]
        return [self._exchanges.broadcast(tensor, self._home) for tensor in (state.hidden, state.labels)]

    def _gather_statistics(self, microbatch: int) -> list[dist.Work]:
        state = self._kept[microbatch]
        state.of_all, gathering = self._exchanges.gather(state.statistics)
        return [gathering]

    def _reduce_gradient(self, microbatch: int) -> list[dist.Work]:
        state = self._kept[microbatch]
        state.wait(Exchanged.STATISTICS)
        scale, of_label = self._softmax(state)
        _, row = self._held(state.labels)
        rows = self._rows.weight().detach()[row[:, 0]]
        state.part.copy_(state.part * scale + rows * of_label)
        return [self._exchanges.reduce(state.part, self._home)]

    def _broadcast_loss(self, microbatch: int) -> list[dist.Work]:
        state = self._kept[microbatch]
        if self._head is None:
            state.loss_gradient = torch.empty_like(state.statistics[0])
        return [self._exchanges.broadcast(state.loss_gradient, self._home)]

    def _held(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether this rank holds each label's row, and its number here; a column each."""
        is_local, row = self._rows.held(labels)
        return is_local[:, None], row[:, None]

    def _softmax(self, state: _MicrobatchLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor from exponentials to softmax, and softmax less 1 for labels in this rank's rows.

        The latter is 0 for a label that another rank holds, whose logit is not known and might overflow.
        """
        largest, total = self._over_all(state)
        local_largest, _, label = state.statistics
        is_local, _ = self._held(state.labels)
        of_label = torch.where(is_local, (label - largest).exp() / total - 1, 0.0)
        return (local_largest - largest).exp() / total, of_label

    def _over_all(self, state: _MicrobatchLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's largest logit and sum of exponentials over all ranks (M and L above)."""
        largest = state.of_all[:, 0].max(dim=0).values
        return largest, (state.of_all[:, 1] * (state.of_all[:, 0] - largest).exp()).sum(dim=0)

    def _lose(self, microbatch: int, state: _MicrobatchLogits) -> torch.Tensor:
        """Give the loss of every token to the head, and return their gradients."""
        assert self._head is not None
        largest, total = self._over_all(state)
        losses = largest + total.log() - state.of_all[:, 2].sum(dim=0)
        return self._head.gradient(microbatch, losses[:, 0])[:, None]


_OF_EMBEDDING = {Exchanged.TOKENS, Exchanged.EMBEDDED, Exchanged.INPUT}


@dataclass
class SharedVocabulary:
    """Its parts of the embedding and of the output layer.

    All ranks launch their exchanges in one order, in groups that carry nothing else.
    """

    embedding: SharedEmbedding
    output: SharedOutput

    def launch(self, exchange: Exchange) -> None:
        """Begin an exchange with the other ranks; later computation does not wait for it."""
        part = self.embedding if exchange.what in _OF_EMBEDDING else self.output
        part.launch(exchange)
