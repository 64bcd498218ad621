"""Clocks: this rank's own, and how far it is from that of the pipeline's first rank.

The clocks of two machines have nothing in common, so before the times of several ranks are laid side by
side each rank asks the first one for the time.  The answer was given somewhere between question and
arrival: taken to be in the middle, it is wrong by half the round trip at most, and the shortest of several
round trips is the one to believe.

On a GPU the host is ahead of its messages: a receive is over for it once it is launched, and so is a send.
Either side therefore reads its clock only around what its host has seen: the first rank once it holds the
question's number, the others before they launch the question and once they hold the answer's.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 10
"""Questions a rank asks; the first of them waits until the first rank is done with the ranks before."""


class Offset(NamedTuple):
    """What to add to this rank's clock to have the first rank's, in seconds, and how wrong it may be."""

    seconds: float
    error: float


def now() -> float:
    """Seconds on this machine's monotonic clock."""
    return time.perf_counter()


def offset_to_first(group: dist.ProcessGroup, device: torch.device) -> Offset:
    """How far this rank's clock is from that of ``group``'s first rank.

    Collective over ``group``, whose backend sends tensors on ``device``; the host waits for every message.
    """
    first, *others = dist.get_process_group_ranks(group)
    told = torch.zeros(1, dtype=torch.float64, device=device)
    if dist.get_rank() != first:
        return min((_ask(first, told, group) for _ in range(ROUNDS)), key=lambda offset: offset.error)
    for other in others:
        for _ in range(ROUNDS):
            _receive(told, other, group)
            told.fill_(now())
            dist.send(told, other, group=group)
    return Offset(0.0, 0.0)


def _ask(first: int, told: torch.Tensor, group: dist.ProcessGroup) -> Offset:
    asked = now()
    dist.send(told, first, group=group)
    answer = _receive(told, first, group)
    half = (now() - asked) / 2
    return Offset(answer - (asked + half), half)


def _receive(told: torch.Tensor, sender: int, group: dist.ProcessGroup) -> float:
    """The number that comes into ``told``, once it is on this host."""
    dist.recv(told, sender, group=group)
    return told.item()
