"""A rank's rows of a shared vocabulary, the collectives of its ranks, and its part of the embedding."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Done, random_numbers
from megatron_pp_ext.schedule.messages import Exchange, Exchanged


@dataclass(frozen=True)
class Rows:
    """``count`` rows, ``first`` and following, of the embedding or of the output weight.

    ``weight()`` returns them, rows x hidden, whenever they are needed; ``add_gradient`` adds to their
    gradient.  Frozen rows have none, ``takes_gradient`` is unset then: on all ranks, or on none.
    """

    first: int
    count: int
    weight: Callable[[], torch.Tensor]
    add_gradient: Callable[[torch.Tensor], None]
    takes_gradient: bool = True

    def held(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each token's row is one of these, and its number here, 0 where it is not."""
        row = tokens - self.first
        is_local = (row >= 0) & (row < self.count)
        return is_local, row * is_local


class Exchanges:
    """Each method begins a collective, in one order on all ranks, and returns a handle to wait for.

    ``pipeline`` is a group of the pipeline's ranks, and ``home`` below a number among these.  ``everyone`` is
    a group of all ranks with rows of the vocabulary; under tensor parallelism these are more than the
    pipeline's.  Both groups carry nothing else.
    """

    def __init__(self, pipeline: dist.ProcessGroup, everyone: dist.ProcessGroup | None = None) -> None:
        self._pipeline, self._everyone = pipeline, everyone or pipeline

    def broadcast(self, tensor: torch.Tensor, home: int) -> dist.Work:
        """Give ``tensor`` of ``home`` to all ranks of the pipeline, which have one of its shape and type."""
        source = dist.get_global_rank(self._pipeline, home)
        return _begun(dist.broadcast(tensor, source, group=self._pipeline, async_op=True))

    def reduce(self, tensor: torch.Tensor, home: int) -> dist.Work:
        """Sum ``tensor`` over all ranks of the pipeline on ``home``; the other ranks' tensors are lost."""
        target = dist.get_global_rank(self._pipeline, home)
        return _begun(dist.reduce(tensor, target, group=self._pipeline, async_op=True))

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Return a buffer for the ``part`` of every rank, ranks x the shape of ``part``, and the handle."""
        whole = part.new_empty(self._everyone.size(), *part.shape)
        gathering = dist.all_gather_into_tensor(
            whole.flatten(0, 1), part, group=self._everyone, async_op=True
        )
        return whole, _begun(gathering)


def _begun(work: dist.Work | None) -> dist.Work:
    """Return the handle of a collective of a group that this rank is in."""
    assert work is not None
    return work


class DummyExchanges(Exchanges):
    """The exchanges of a rank that runs alone with its part of a vocabulary of ``rows`` rows.

    The broadcasts of other ranks are random: tokens and labels of the whole vocabulary, and small numbers.
    Sums are this rank's own part, and every rank's statistics are this rank's.
    """

    def __init__(self, pipeline: dist.ProcessGroup, everyone: dist.ProcessGroup, rows: int) -> None:
        super().__init__(pipeline, everyone)
        self._rows = rows

    def broadcast(self, tensor: torch.Tensor, home: int) -> Any:
        if home != self._pipeline.rank():
            if tensor.is_floating_point():
                tensor.copy_(random_numbers(tensor.shape, tensor.dtype, tensor.device))
            else:
                tensor.random_(self._rows)
        return Done()

    def reduce(self, tensor: torch.Tensor, home: int) -> Any:
        return Done()

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return part.repeat(self._everyone.size(), *(1 for _ in part.shape)), Done()


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

    The first stage sends the tokens of a microbatch ahead of time.  Each rank looks up those whose rows it
    has and leaves 0 for the others; the sum over all ranks goes to the first stage.  The gradient of that sum
    comes back to all ranks, and each adds it to the rows that it has.  For frozen rows nothing comes back.
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
