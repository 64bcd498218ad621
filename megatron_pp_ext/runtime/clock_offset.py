"""The clock of a rank, and its offset from the clock of the pipeline's first rank.

The clocks of two machines have nothing in common.  Before the times of several ranks are compared, each
rank requests the time from the first one.  The first rank reads its clock at some moment of the round
trip; if that is taken to be the middle, the error is half the round trip at most.  The shortest of several
round trips is used.

On a GPU the host is ahead of its messages: it goes on as soon as a send or a receive is launched.
Each side therefore reads its clock only around numbers that its host holds: the first rank once it holds
the request's number, the others before they launch the request and once they hold the reply's number.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.groups import wire_of

ROUNDS = 10
"""Requests of each rank; its first one waits until the first rank has served the ranks before it."""


class Offset(NamedTuple):
    """Seconds to add to this rank's clock to get the first rank's, and how wrong they may be at most."""

    seconds: float
    error: float


def now() -> float:
    """Return the seconds of this machine's monotonic clock."""
    return time.perf_counter()


def processor_seconds() -> float:
    """Return the seconds for which a core has worked for this thread.

    Autograd runs the backward of tensors in a CPU's memory in the thread that requests it, so that this clock
    counts forwards and backwards alike.  It leaves out the threads with which OpenMP shares an operation:
    they work while this one does.
    """
    return time.thread_time()


def offset_to_first(group: dist.ProcessGroup, device: torch.device) -> Offset:
    """Measure the offset of this rank's clock from the clock of ``group``'s first rank.

    Collective over ``group``, whose ranks compute on ``device``; the host waits for every message.
    """
    first, *peers = dist.get_process_group_ranks(group)
    number = torch.zeros(1, dtype=torch.float64, device=wire_of(group, device))
    if dist.get_rank() != first:
        return min(
            (_round_trip(first, number, group) for _ in range(ROUNDS)), key=lambda offset: offset.error
        )
    for peer in peers:
        for _ in range(ROUNDS):
            _receive(number, peer, group)
            number.fill_(now())
            dist.send(number, peer, group=group)
    return Offset(0.0, 0.0)


def _round_trip(first: int, number: torch.Tensor, group: dist.ProcessGroup) -> Offset:
    start = now()
    dist.send(number, first, group=group)
    reply = _receive(number, first, group)
    half = (now() - start) / 2
    return Offset(reply - (start + half), half)


def _receive(number: torch.Tensor, sender: int, group: dist.ProcessGroup) -> float:
    """Receive into ``number``, and return it once it is on this host."""
    dist.recv(number, sender, group=group)
    return number.item()
