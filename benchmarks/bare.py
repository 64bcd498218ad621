"""What the machine itself adds: ranks that sleep and pass bytes, with neither torch nor a scheduler.

Each rank walks through its actions in order, takes its messages when it needs them and sends
them when it has slept.  The sleep is a full one, whenever it began: a late core makes the action longer.
"""

import ctypes
import os
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from multiprocessing import get_context
from threading import Thread
from typing import Protocol

from sleeping import Times

from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.messages import Message

Wires = dict[tuple[int, int], tuple[socket.socket, socket.socket]]
"""(sender, receiver) to the sender's and the receiver's end."""

_PARENT_DEATH_SIGNAL, _TIMER_SLACK = 1, 29
"""Options of Linux's prctl(2): the signal to get when the parent ends, nanoseconds to prolong a sleep by."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt(3): free memory to give back, and blocks to ask the system for one by one."""


def wire_up(ranks: int) -> Wires:
    """Between all ranks, to be made before they are forked."""
    return {pair: socket.socketpair() for pair in permutations(range(ranks), 2)}


class Transport(Protocol):
    """Passes messages whose content nobody looks at, in order, between two ranks."""

    def post(self, peer: int, message: Message) -> None:
        """Learn that ``message`` is the next one that ``peer`` sends."""

    def send(self, peer: int) -> None:
        """Give a message for ``peer`` away."""

    def receive(self, peer: int, message: Message) -> None:
        """Wait until ``message`` of ``peer`` is here."""


class Sockets:
    """Plain sockets, for messages that fit into their buffers."""

    def __init__(self, rank: int, wires: Wires, message_bytes: int) -> None:
        self._rank, self._wires, self._message = rank, wires, bytes(message_bytes)
        self._coming: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._here: set[Message] = set()

    def post(self, peer: int, message: Message) -> None:
        """Nothing but a note: a socket takes messages that nobody has asked for yet."""
        self._coming[peer].append(message)

    def send(self, peer: int) -> None:
        """Into the socket's buffer."""
        self._wires[self._rank, peer][0].sendall(self._message)

    def receive(self, peer: int, message: Message) -> None:
        """Out of the socket's buffer, by the rank itself, with all that were sent before it."""
        while message not in self._here:
            self._wires[peer, self._rank][1].recv(len(self._message), socket.MSG_WAITALL)
            self._here.add(self._coming[peer].popleft())
        self._here.remove(message)


def walk(plan: RankPlan, chunks: int, times: Times, transport: Transport) -> None:
    """Run one step of ``plan``."""
    seconds = {Kind.F: times.forward, Kind.I: times.input_gradient, Kind.W: times.weight_gradient}
    seconds[Kind.B] = times.input_gradient + times.weight_gradient
    for step in plan.steps:
        for peer, message in step.receives:
            transport.post(peer, message)
        if step.source is not None and step.source_rank != plan.rank:
            transport.receive(step.source_rank, step.source)
        time.sleep(seconds[step.action.kind] / chunks)
        if step.target is not None and step.target_rank != plan.rank:
            transport.send(step.target_rank)


def core_seconds(message_bytes: int, count: int = 50) -> float:
    """What both ends of a socket take of a core for one message, as the mean of ``count``."""
    sender, receiver = socket.socketpair()
    message, reader = bytes(message_bytes), Thread(target=_read, args=(receiver, count * message_bytes))
    before = time.process_time()
    reader.start()
    for _ in range(count):
        sender.sendall(message)
    reader.join()
    return (time.process_time() - before) / count


def _read(receiver: socket.socket, left: int) -> None:
    buffer = bytearray(1 << 20)
    while left:
        left -= receiver.recv_into(buffer, min(left, len(buffer)))


def sleep_precisely() -> None:
    """Let this process's sleeps end on time; Linux prolongs them by 50 microseconds otherwise."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1)


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees instead of giving it back, as torch does on a GPU."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_THRESHOLD, 2**30)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep every core from halting, by a process on each that anything else preempts.

    The ranks sleep most of the time, and a virtual core that halts is woken by its host, which takes long;
    cores of a cluster's nodes that train do not halt.
    """
    spinners = [get_context("fork").Process(target=_spin, args=(core,), daemon=True) for core in _cores()]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def stay_on_a_core(rank: int) -> None:
    """Bind this process to one of the cores that it may use; ranks take turns over them."""
    cores = _cores()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _spin(core: int) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass
