"""A rank's part of an embedding that all ranks of a pipeline share.

The first stage sends the tokens of a microbatch ahead of time.  Each rank looks up those whose rows it has
and leaves 0 for the others; the sum over all ranks goes to the first stage.  The gradient of that sum comes
back to all ranks, and each adds it to the rows that it has.  For frozen rows nothing comes back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges
from megatron_pp_ext.features.vocabulary.runtime.rows import Rows
from megatron_pp_ext.schedule.messages import Exchange, Exchanged


@dataclass
class _MicrobatchTokens:
    """A microbatch's tensors on a rank; ``gradient`` is set after the first stage's backward."""

    tokens: torch.Tensor
    known: dist.Work
    embedded: torch.Tensor | None = None
    summed: dist.Work | None = None
    gradient: torch.Tensor | None = None


class SharedEmbedding:
    """The part of this rank: ``rows`` of the embedding.

    A microbatch has tokens of ``shape``, all on ``device``.  ``home`` is the rank of the pipeline with the
    first stage; there ``tokens(microbatch)`` returns them, and is called for one microbatch after the other.
    ``completing`` makes a context around the end of the step, which completes the gradient.
    """

    def __init__(
        self,
        rows: Rows,
        shape: torch.Size,
        device: torch.device,
        exchanges: Exchanges,
        home: int,
        tokens: Callable[[int], torch.Tensor] | None = None,
        completing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._rows, self._shape, self._device = rows, shape, device
        self._exchanges, self._home, self._tokens = exchanges, home, tokens
        self._completing = completing
        self._kept: dict[int, _MicrobatchTokens] = {}
        self._arriving: tuple[int, dist.Work] | None = None
        self._sent: _MicrobatchTokens | None = None

    def launch(self, exchange: Exchange) -> None:
        """Begin an exchange; later computation does not wait for it."""
        begin = {
            Exchanged.TOKENS: self._broadcast_tokens,
            Exchanged.EMBEDDED: self._reduce_embedded,
            Exchanged.INPUT: self._broadcast_gradient,
        }[exchange.what]
        begin(exchange.microbatch)

    def embedded(self, microbatch: int) -> torch.Tensor:
        """Return the embedded tokens, ``shape`` x hidden, on the first stage's rank."""
        state = self._kept[microbatch]
        assert state.embedded is not None and state.summed is not None
        state.summed.wait()
        embedded, state.embedded = state.embedded, None
        return embedded

    def take(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of ``embedded``'s result, for the exchange."""
        if self._rows.takes_gradient:
            assert gradient is not None
            self._kept[microbatch].gradient = gradient.detach().contiguous()

    def close(self) -> None:
        """End a step: all gradients are added.  An evaluation has none."""
        with self._completing():
            self._add_arrived()
            self._release_sent()
            self._kept.clear()

    def _broadcast_tokens(self, microbatch: int) -> None:
        if self._tokens is not None:
            tokens = self._tokens(microbatch).contiguous()
            if tokens.shape != self._shape:
                raise RuntimeError(
                    f"microbatch {microbatch} has tokens of shape {tuple(tokens.shape)} where all ranks "
                    f"expect {tuple(self._shape)}; a shared vocabulary needs microbatches of one shape"
                )
        else:
            tokens = torch.empty(self._shape, dtype=torch.long, device=self._device)
        self._kept[microbatch] = _MicrobatchTokens(tokens, self._exchanges.broadcast(tokens, self._home))

    def _reduce_embedded(self, microbatch: int) -> None:
        self._release_sent()
        state = self._kept[microbatch]
        state.known.wait()
        is_local, row = self._rows.held(state.tokens)
        # Rows of other ranks are 0, and not a product with 0, which would spread a number that is none.
        state.embedded = self._rows.weight().detach()[row].masked_fill_(~is_local[..., None], 0.0)
        state.summed = self._exchanges.reduce(state.embedded, self._home)
        if self._tokens is None:
            self._sent = state

    def _release_sent(self) -> None:
        """Release the rows sent to the first stage; they had time until the next exchange to arrive."""
        if self._sent is not None and self._sent.summed is not None:
            self._sent.summed.wait()
            self._sent.embedded = None
            self._sent = None

    def _broadcast_gradient(self, microbatch: int) -> None:
        if not self._rows.takes_gradient:
            del self._kept[microbatch]
            return
        self._add_arrived()
        state = self._kept[microbatch]
        if state.gradient is None:
            weight = self._rows.weight()
            state.gradient = torch.empty(
                *self._shape, weight.shape[1], dtype=weight.dtype, device=self._device
            )
        self._arriving = microbatch, self._exchanges.broadcast(state.gradient, self._home)

    def _add_arrived(self) -> None:
        """Add the gradient that was broadcast last; it had time until the next one to arrive."""
        if self._arriving is None:
            return
        microbatch, work = self._arriving
        self._arriving = None
        work.wait()
        state = self._kept.pop(microbatch)
        assert state.gradient is not None
        is_local, row = self._rows.held(state.tokens)
        count = self._rows.count
        # One row more than there are takes the tokens of other ranks, and torch passes over it.
        row = torch.where(is_local, row, count)
        gradient = torch.ops.aten.embedding_dense_backward(state.gradient, row, count + 1, count, False)
        self._rows.add_gradient(gradient[:count])
