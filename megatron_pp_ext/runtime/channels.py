"""Ordered point-to-point messages between pipeline ranks, and channels for a rank that runs alone."""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.groups import direction_groups as direction_groups
from megatron_pp_ext.runtime.groups import wire_of
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message

DIMENSIONS = 3
"""The number of lengths that announce a message's shape: sequence, batch, hidden."""

LARGE = 1 << 20
"""The bytes from which a thread hands messages to gloo; it gains nothing for fewer where no core is free."""


type Shape = tuple[int, ...]


class OtherShape(ValueError):
    """A stage has made a message of another shape than both ends have agreed on."""


class PeerLost(RuntimeError):
    """A rank that this one exchanges messages with has ended, or has not answered in time."""


class _Posted(NamedTuple):
    peer: int
    tensor: torch.Tensor
    work: dist.Work


class _HandedOver(NamedTuple):
    """Stands for the work of a send that a thread starts."""

    started: Future[dist.Work]

    def is_completed(self) -> bool:
        return self.started.done() and self.started.result().is_completed()

    def wait(self) -> None:
        self.started.result().wait()


class _Sent(NamedTuple):
    """A message under way, with its shape where that is announced."""

    works: Sequence[dist.Work | _HandedOver]
    tensors: Sequence[torch.Tensor]
    peer: int | None = None


class Channels:
    """Sends and receives the messages of one rank, in one training step or in many.

    ``ranks[r]`` is the global rank of pipeline rank r; ``down`` and ``up`` are process groups
    over all of them, for messages to a higher and to a lower pipeline rank.  Every message is a
    tensor of ``dtype`` on ``device``.  Its shape is its microbatch's in ``shapes`` where there are any,
    and ``shape`` elsewhere.  With an empty ``shape`` every message may have another one, which is sent ahead
    of it; the receiver's host then stops where the receive is posted, until the message comes.  A gradient
    has the shape of its tensor, and announces none.  The shapes that are announced are added
    to ``announced``, if it is given, by microbatch.  Where each microbatch ``has_one_shape`` on all stages,
    messages may repeat an earlier one's, and announce none either.

    Two ranks that exchange anything have one channel in each direction, and a channel is first in, first out:
    the receiver knows from the schedule the next message of the sender, so no message carries a tag.  The
    plan states when each receive is posted (``schedule.messages``, with the proof that no pipeline can hang
    whatever the hardware's queues, buffers and synchronizations are): nothing here posts a receive by itself,
    and nothing relies on messages passing each other.

    Each direction has a process group.  Under a backend that gives the peers of a group streams of their own,
    a message therefore waits only for messages between the same two ranks.  On a GPU a message is launched
    after everything that the compute stream has by then, and waiting for one stops the compute stream and not
    the host; under gloo, and for messages that announce their shapes, it stops the host.

    Gloo copies a message into its socket before ``send`` returns, if the receive is posted by then.  A thread
    therefore hands large messages to gloo, in their order, and the stage computes meanwhile.
    """

    def __init__(
        self,
        ranks: list[int],
        down: dist.ProcessGroup,
        up: dist.ProcessGroup,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        shapes: Sequence[Sequence[int]] = (),
        announced: dict[int, set[Shape]] | None = None,
        has_one_shape: bool = False,
    ) -> None:
        self.is_closed = False
        rank, self._ranks = ranks.index(dist.get_rank()), ranks
        # The groups' own methods are called below: torch's isend and irecv look the peer up every time.
        self._peers = [dist.get_group_rank(down, rank) for rank in ranks]
        self._to = [down if rank < peer else up for peer in range(len(ranks))]
        self._from = [down if peer < rank else up for peer in range(len(ranks))]
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._shapes = tuple(map(tuple, shapes))
        self._announced, self._has_one_shape = announced, has_one_shape
        self._of_microbatches: dict[int, Shape] = {}
        self._of_gradients: dict[Message, Shape] = {}
        self._wire = wire_of(down, device)
        self._through_host = self._wire.type != device.type
        is_large = max(map(prod, self._shapes or (self._shape,))) * dtype.itemsize >= LARGE
        self._sender = ThreadPoolExecutor(1) if is_large and dist.get_backend(down) == "gloo" else None
        self._posted: dict[Message, _Posted] = {}
        self._sending: deque[_Sent] = deque()

    def post(self, peer: int, message: Message, repeats: bool = False) -> None:
        """Post the receive of ``message``, the next one that pipeline rank ``peer`` sends here.

        One that ``repeats`` has the shape of its microbatch's earlier messages here, and announces none.
        """
        if message in self._posted:
            raise ValueError(f"the receive of {message} is posted already; post each message once")
        shape = self._shape_of(message, repeats)
        if not shape:
            announced, work = self._receive(peer, (DIMENSIONS,), torch.long)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(peer, f"waiting for the shape of {_described(message)}", error) from error
            shape = tuple(announced.tolist())
            self._keep(message, shape)
        self._posted[message] = _Posted(peer, *self._receive(peer, shape, self._dtype))

    def receive(self, peer: int, message: Message) -> torch.Tensor:
        """Return the tensor of ``message`` from pipeline rank ``peer``; the next computation waits for it.

        ValueError if its receive was not posted.
        """
        posted = self._posted.pop(message, None)
        if posted is None or posted.peer != peer:
            raise ValueError(f"no receive of {message} from rank {peer} is posted; post it first")
        try:
            posted.work.wait()
        except RuntimeError as error:
            raise self._lost(peer, f"waiting for {_described(message)}", error) from error
        return posted.tensor.to(self._device) if self._through_host else posted.tensor

    def send(self, peer: int, message: Message, tensor: torch.Tensor, repeats: bool = False) -> None:
        """Start sending ``tensor``, which is detached, to pipeline rank ``peer`` as its ``message``.

        What is computed next waits until at most ``SENDS_AHEAD`` of this rank's messages are unfinished.  The
        tensor's storage is kept until then; the caller may drop its own reference but must not write to it.
        With ``repeats`` see ``post``.  OtherShape where the receiver expects another shape.
        """
        payload, agreed = tensor.contiguous(), self._shape_of(message, repeats)
        if self._through_host:
            payload = payload.to(self._wire)
        if not agreed:
            self._keep(message, tuple(payload.shape))
            shape = torch.tensor(payload.shape, dtype=torch.long, device=self._wire)
            self._send(peer, shape, payload)
        elif payload.shape != agreed:
            raise _other_shape(payload.shape, agreed)
        else:
            self._send(peer, payload)
        while len(self._sending) > SENDS_AHEAD or self._has_left():
            self._finish_oldest()

    def close(self) -> None:
        """Wait until every message has left; RuntimeError if a posted one was never taken."""
        while self._sending:
            self._finish_oldest()
        if self._posted:
            raise RuntimeError(f"messages that no action took by the end of the step: {[*self._posted]}")
        self.is_closed = True

    def _shape_of(self, message: Message, repeats: bool) -> Shape:
        """Return the shape that both ends of ``message`` know, empty where it is announced."""
        if self._shapes:
            return self._shapes[message.microbatch]
        if self._shape or not repeats:
            return self._shape or self._of_gradients.pop(message, ())
        shape = self._of_microbatches[message.microbatch]
        self._of_gradients[_gradient_of(message)] = shape
        return shape

    def _keep(self, message: Message, shape: Shape) -> None:
        if self._has_one_shape:
            first = self._of_microbatches.setdefault(message.microbatch, shape)
            if shape != first:
                raise _other_shape(shape, first)
        self._of_gradients[_gradient_of(message)] = shape
        if self._announced is not None:
            self._announced.setdefault(message.microbatch, set()).add(shape)

    def _has_left(self) -> bool:
        """Return whether the oldest message is sent, as far as that may be asked.

        A graph that is being captured must not ask the device.
        """
        if not self._sending or (self._wire.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return False
        return all(work.is_completed() for work in self._sending[0].works)

    def _finish_oldest(self) -> None:
        # A finished send is waited for too: only then does torch release the tensor and raise an error.
        sent = self._sending.popleft()
        try:
            for work in sent.works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(sent.peer, "sending it a message", error) from error

    def _lost(self, peer: int | None, activity: str, error: RuntimeError) -> PeerLost:
        """Return the error of this rank, which ``error`` of the connection to ``peer`` has interrupted."""
        name = "a rank of the pipeline" if peer is None else f"rank {self._ranks[peer]}"
        this_rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this one"
        cause = " ".join(str(error).split())
        return PeerLost(
            f"{name} has ended, or does not answer, while {this_rank} was {activity} "
            f"({cause[:160]}); see what that rank printed, and go on from a checkpoint"
        )

    def _send(self, peer: int, *tensors: torch.Tensor) -> None:
        """Start sending ``tensors``, which are one message."""
        sends = [partial(self._to[peer].send, [tensor], self._peers[peer], 0) for tensor in tensors]
        works = [_HandedOver(self._sender.submit(send)) if self._sender else send() for send in sends]
        self._sending.append(_Sent(works, tensors, peer))

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, dist.Work]:
        tensor = torch.empty(shape, dtype=dtype, device=self._wire)
        work = self._from[peer].recv([tensor], self._peers[peer], 0)
        return tensor, work


def _other_shape(shape: Sequence[int], agreed: Shape) -> OtherShape:
    return OtherShape(
        f"a stage produced a message of shape {tuple(shape)} where {agreed} was agreed; "
        "make all stages and microbatches hand on tensors of one shape"
    )


def _described(message: Message) -> str:
    sender, receiver, microbatch = message
    kind = "activation" if sender < receiver else "gradient"
    return f"the {kind} of microbatch {microbatch} from stage {sender}"


def _gradient_of(message: Message) -> Message:
    sender, receiver, microbatch = message
    return Message(receiver, sender, microbatch)


SCALE = 0.01
"""Standard deviation of the random numbers: small enough, as gradients, for weights to stay finite."""


class Done:
    """Stands for a message that has arrived, as a ``torch.distributed.Work`` does."""

    def wait(self) -> bool:
        """Return at once."""
        return True


class DummyChannels(Channels):
    """The channels of a rank that runs alone: messages that it sends are dropped, those received are random.

    Receives are posted, kept and released when real ones would be, so that they take the same memory.
    Zeros would be faster to compute with than real numbers, and uninitialized memory may not be finite.
    """

    def _send(self, peer: int, *tensors: torch.Tensor) -> None:
        pass

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return random_numbers(torch.Size(self._shape), self._dtype, self._device).clone(), Done()


@cache
def random_numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return small random numbers, the same ones for every call."""
    generator = torch.Generator().manual_seed(0)
    return (SCALE * torch.randn(shape, generator=generator)).to(device=device, dtype=dtype)
