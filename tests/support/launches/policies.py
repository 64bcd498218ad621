"""Launches of pipelines that post receives by other rules than the product's plan, for comparison.

``TWO_AHEAD`` is how the channels worked before receives were planned.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.messages import Message, incoming_message, outgoing_message
from tests.support.launches.entries import Entry, Kernel, Launches, Transfer, Wait
from tests.support.launches.recording import SECONDS


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule by which a channel keeps ``ahead`` receives posted, posting before or after it waits for one."""

    ahead: int
    posts_before_it_waits: bool = False


TWO_AHEAD = Policy(2, posts_before_it_waits=True)
ONE_AHEAD = Policy(1)
WHEN_NEEDED = Policy(0)


def launch(
    steps: Sequence[Schedule], policy: Policy, seconds: Mapping[Kind, float] = SECONDS
) -> tuple[Launches, ...]:
    """Return the launches of all ranks under ``policy`` in ``steps``, of which only the last flushes."""
    return tuple(_launch_rank(rank, steps, policy, seconds) for rank in range(steps[0].ranks))


class _Rank:
    """The launches of one rank and the receives that it has posted."""

    def __init__(self, rank: int, policy: Policy) -> None:
        self.entries: list[Entry] = []
        self._rank, self._policy = rank, policy
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[int, deque[tuple[Message, int]]] = {}
        self._arrived: set[Message] = set()
        self._sends: list[int] = []

    def expect(self, peer: int, messages: Sequence[Message]) -> None:
        self._expected.setdefault(peer, deque()).extend(messages)
        self._posted.setdefault(peer, deque())
        self._post_ahead(peer)

    def take(self, peer: int, message: Message) -> None:
        while message not in self._arrived:
            if not self._posted[peer]:
                self._post(peer)
            first, number = self._posted[peer].popleft()
            if self._policy.posts_before_it_waits:
                self._post_ahead(peer)
            self.entries.append(Wait(number))
            if not self._policy.posts_before_it_waits:
                self._post_ahead(peer)
            self._arrived.add(first)

    def send(self, peer: int) -> None:
        self._sends.append(len(self.entries))
        self.entries.append(Transfer("down" if peer > self._rank else "up", peer, is_send=True))

    def close(self) -> None:
        self.entries.extend(map(Wait, self._sends))

    def _post_ahead(self, peer: int) -> None:
        while self._expected[peer] and len(self._posted[peer]) < self._policy.ahead:
            self._post(peer)

    def _post(self, peer: int) -> None:
        message = self._expected[peer].popleft()
        self._posted[peer].append((message, len(self.entries)))
        self.entries.append(Transfer("down" if peer < self._rank else "up", peer, is_send=False))


def _launch_rank(
    rank: int, steps: Sequence[Schedule], policy: Policy, seconds: Mapping[Kind, float]
) -> Launches:
    found = _Rank(rank, policy)
    for schedule in steps:
        placement = schedule.placement
        for peer in range(schedule.ranks):
            sent = (outgoing_message(action, placement.stages) for action in schedule.orders[peer])
            to_here = [m for m in sent if m is not None and placement.rank_of(m.receiver) == rank]
            if peer != rank and to_here:
                found.expect(peer, to_here)
        for action in schedule.orders[rank]:
            source = incoming_message(action, placement.stages)
            if source is not None and placement.rank_of(source.sender) != rank:
                found.take(placement.rank_of(source.sender), source)
            found.entries.append(Kernel(str(action), seconds[action.kind]))
            target = outgoing_message(action, placement.stages)
            if target is not None and placement.rank_of(target.receiver) != rank:
                found.send(placement.rank_of(target.receiver))
    found.close()
    return tuple(found.entries)
