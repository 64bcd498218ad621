"""Ordered point-to-point messages between pipeline ranks.

Two ranks that exchange anything have one channel in each direction, and a channel is first in,
first out: the receiver knows from the schedule what the sender will send next, so no message
carries a tag.  Receives are posted ahead of their use and sends never block, so whatever
order the actions run in, no rank can wait for a message whose sender waits for it in turn
(a schedule in which the *actions* wait in a circle is refused by ``schedule.check``).

Each direction has a process group, hence, under NCCL, a communicator of its own for any two
ranks: a send can then never queue behind a receive that its peer has not matched yet.  NCCL orders
messages on streams of its own, against the compute stream by events: nothing here waits on the host.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.plan import Message, RankPlan

RECEIVES_AHEAD = 2
"""Receives posted on a channel before their turn.

Two hide a message's flight behind the action before it.  More would only move waiting tensors
from the sender's memory to the receiver's.
"""

DIMENSIONS = 3
"""Of messages that tell their shapes: sequence, batch, hidden."""


class Channels:
    """The messages of one rank during a training step.

    ``ranks[r]`` is the global rank of pipeline rank r; ``down`` and ``up`` are process groups
    over all of them, for messages to a higher and to a lower pipeline rank.  Every message is a
    tensor of ``shape`` and ``dtype`` on ``device``.  With an empty ``shape`` every message may have
    another one, which it sends ahead; then only one receive can be posted early, that of the shape.
    """

    def __init__(
        self,
        ranks: list[int],
        down: dist.ProcessGroup,
        up: dist.ProcessGroup,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        here = ranks.index(dist.get_rank())
        # The groups' own methods are called below: torch's isend and irecv look the peer up every time.
        self._peers = [dist.get_group_rank(down, rank) for rank in ranks]
        self._to = [down if here < peer else up for peer in range(len(ranks))]
        self._from = [down if peer < here else up for peer in range(len(ranks))]
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        # Gloo takes messages from host memory alone: on a GPU, a way to be correct where NCCL cannot be had.
        self._wire = torch.device("cpu") if dist.get_backend(down) == "gloo" else device
        self._through_host = self._wire.type != device.type
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[int, deque[tuple[Message, torch.Tensor, dist.Work]]] = {}
        self._arrived: dict[Message, torch.Tensor] = {}
        self._sending: deque[tuple[int, dist.Work, torch.Tensor]] = deque()
        self._opened = 0

    def open(self, plan: RankPlan) -> None:
        """Learn what will be sent here in this step and post the first receives.

        What an earlier step left in flight comes first.
        """
        self._opened += 1
        # Gloo's sends end for nobody who does not wait for them.  Those of p steps ago have arrived: without
        # them no microbatch of the last step had come this far.
        while self._sending and self._sending[0][0] < self._opened - len(self._peers):
            self._sending.popleft()[1].wait()
        for peer, messages in plan.incoming.items():
            self._expected.setdefault(peer, deque()).extend(messages)
            self._posted.setdefault(peer, deque())
            self._post_receives(peer)

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` to pipeline rank ``peer`` and return at once.

        The tensor's storage is kept until it has left; the caller may drop its own reference
        but must not write to it.
        """
        payload = tensor.detach().contiguous()
        if self._through_host:
            payload = payload.to(self._wire)
        if not self._shape:
            self._send(peer, torch.tensor(payload.shape, dtype=torch.long, device=self._wire))
        elif payload.shape != self._shape:
            raise ValueError(
                f"a stage produced a message of shape {tuple(payload.shape)} where {self._shape} was agreed; "
                "make all stages and microbatches hand on tensors of one shape"
            )
        self._send(peer, payload)
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def receive(self, peer: int, message: Message) -> torch.Tensor:
        """The tensor of ``message`` from pipeline rank ``peer``; waits until it is here.

        Messages that were sent before it and are not needed yet are kept for their turn.
        """
        while message not in self._arrived:
            if not self._posted[peer]:
                raise ValueError(f"rank {peer} does not send {message} in this step")
            first, tensor, work = self._posted[peer].popleft()
            if not self._shape:
                work.wait()
                tensor, work = self._receive(peer, tensor.tolist(), self._dtype)
            self._post_receives(peer)
            work.wait()
            self._arrived[first] = tensor.to(self._device) if self._through_host else tensor
        return self._arrived.pop(message)

    def close(self) -> None:
        """Wait until every message has left; RuntimeError if one that came was never asked for."""
        while self._sending:
            self._sending.popleft()[1].wait()
        left_over = [*self._arrived, *(entry[0] for queue in self._posted.values() for entry in queue)]
        if left_over:
            raise RuntimeError(f"messages that nobody asked for at the end of the step: {left_over}")

    def _post_receives(self, peer: int) -> None:
        expected, posted = self._expected[peer], self._posted[peer]
        while expected and len(posted) < (RECEIVES_AHEAD if self._shape else 1):
            if self._shape:
                tensor, work = self._receive(peer, self._shape, self._dtype)
            else:
                tensor, work = self._receive(peer, (DIMENSIONS,), torch.long)
            posted.append((expected.popleft(), tensor, work))

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        work = self._to[peer].send([tensor], self._peers[peer], 0)
        self._sending.append((self._opened, work, tensor))

    def _receive(self, peer: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, dist.Work]:
        tensor = torch.empty(shape, dtype=dtype, device=self._wire)
        work = self._from[peer].recv([tensor], self._peers[peer], 0)
        return tensor, work


def direction_groups(
    ranks: list[int], patience: timedelta | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups, down and up, of the pipeline whose global ranks are ``ranks``.

    A message that takes longer than ``patience`` is an error; None leaves it to the backend.

    Collective over the whole world, since making any group is: every rank calls it with its
    own pipeline's ranks.  Neighbours, and the pipeline's two ends, have exchanged a message on return.

    RuntimeError where torch would serialize all messages of a group.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) == "nccl" and world.bound_device_id is not None:
        raise RuntimeError(
            "init_process_group was called with device_id, under which torch runs all messages of a group "
            "one by one, and pipeline ranks would wait for each other for ever; call it without device_id"
        )
    gathered: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ranks)
    mine = None
    for pipeline in sorted({tuple(other) for other in gathered if other is not None}):
        down = dist.new_group(pipeline, timeout=patience, group_desc="PIPELINE_DOWN")
        up = dist.new_group(pipeline, timeout=patience, group_desc="PIPELINE_UP")
        if pipeline == tuple(ranks):
            assert isinstance(down, dist.ProcessGroup) and isinstance(up, dist.ProcessGroup)
            mine = (down, up)
    assert mine is not None, "a rank is missing from its own pipeline"
    _meet(ranks, *mine)
    return mine


def _meet(ranks: list[int], down: dist.ProcessGroup, up: dist.ProcessGroup) -> None:
    """Send one message each way between neighbours, in one order on all ranks.

    NCCL makes the communicator of two ranks at their first message, and both wait for that: in the order of
    a schedule, one rank could wait so for a second, which waits for a third, which waits for the first.
    """
    here, size = ranks.index(dist.get_rank()), len(ranks)
    on_gpu = dist.get_backend(down) == "nccl"
    greeting = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    for one in sorted({tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)}):
        if here not in one or size == 1:
            continue
        low, high = (ranks[rank] for rank in one)
        for group, sender, receiver in ((down, low, high), (up, high, low)):
            if dist.get_rank() == sender:
                dist.send(greeting, receiver, group=group)
            else:
                dist.recv(greeting, sender, group=group)
