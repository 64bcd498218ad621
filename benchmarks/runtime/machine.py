"""How the machine is kept from disturbing ranks that sleep, and the cost of a message on its cores."""

import ctypes
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from threading import Thread

import torch
import torch.distributed as dist

from benchmarks.measuring import in_turns

_PARENT_DEATH_SIGNAL, _TIMER_SLACK = 1, 29
"""Options of Linux's prctl(2): the signal at the parent's end, nanoseconds by which a sleep is prolonged."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt(3): the sizes from which memory is returned and allocated by mmap."""


def core_seconds(message_bytes: int, count: int = 50) -> float:
    """Return the processor seconds that both ends of a socket take for one message, the mean of ``count``."""
    sender, receiver = socket.socketpair()
    message, reader = bytes(message_bytes), Thread(target=_read, args=(receiver, count * message_bytes))
    before = time.process_time()
    reader.start()
    for _ in range(count):
        sender.sendall(message)
    reader.join()
    return (time.process_time() - before) / count


def _read(receiver: socket.socket, remaining: int) -> None:
    buffer = bytearray(1 << 20)
    while remaining:
        remaining -= receiver.recv_into(buffer, min(remaining, len(buffer)))


def sleep_precisely() -> None:
    """Let sleeps of this process end on time; Linux prolongs them by 50 microseconds otherwise."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1)


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it, as torch does on a GPU."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_MMAP_THRESHOLD, 2**30)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep every core from halting, by an idle-priority process on each.

    The ranks sleep most of the time, and a virtual core that has halted takes long to be woken by its host;
    cores of nodes that train do not halt.
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


def pin_to_core(rank: int) -> None:
    """Let this rank sleep precisely and keep freed memory, with one thread on one core, round robin."""
    torch.set_num_threads(1)
    sleep_precisely()
    keep_freed_memory()
    cores = _cores()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def spans_in_turns[Key](
    ways: Mapping[Key, Callable[[], object]], repeats: int
) -> dict[Key, list[tuple[float, float]]]:
    """Return start and end of so many steps of each of ``ways`` here, after one that does not count."""

    def timed(run: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter()
        run()
        return start, time.perf_counter()

    timed_ways = {key: partial(timed, run) for key, run in ways.items()}
    gc.collect()
    gc.freeze()  # the collector need not look through imported modules within a step
    return in_turns(timed_ways, repeats, warm_up=1)


def step_seconds(of_ranks: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the seconds of every step, from the starts and the ends that each of the ranks saw.

    All ranks read the machine's one monotonic clock.
    """
    return [
        max(end for _, end in step) - min(start for start, _ in step) for step in zip(*of_ranks, strict=True)
    ]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _spin(core: int) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass
