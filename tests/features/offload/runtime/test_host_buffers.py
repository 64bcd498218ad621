"""Buffers of the host: used again by size, never more than the limit, and released where sizes change."""

import random
import weakref
from contextlib import contextmanager

import pytest
import torch

from megatron_pp_ext.features.offload.runtime import host_buffers
from megatron_pp_ext.features.offload.runtime.host_buffers import CopyStreams, HostBuffers, Transfer

MIB = 1 << 20


class Ended:
    """A copy that counts how often the host has waited for it."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        pass

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def pinned(monkeypatch):
    """The sizes that were pinned, of memory that takes none, each with whether it is still there."""
    found = []

    def pin(size):
        memory = torch.empty(size, dtype=torch.uint8, device="meta")
        found.append((size, weakref.ref(memory)))
        return memory

    monkeypatch.setattr(host_buffers, "_pinned", pin)
    return found


def test_a_buffer_is_used_again():
    buffers = HostBuffers(1000)
    one = buffers.take(600)
    assert one.memory.nbytes >= 600
    assert buffers.take(600) is None, "that would be 1200 bytes"
    buffers.give_back(one)
    assert buffers.take(590) is one
    assert (buffers.used_bytes, buffers.pinned_bytes) == (one.memory.nbytes, one.memory.nbytes)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1024, 1025, 3 << 20, (1 << 30) + 1])
def test_an_eighth_of_a_buffer_at_most_is_not_used(size, pinned):
    HostBuffers(2 * size).take(size)
    assert size <= pinned[0][0] <= size * 9 / 8


def test_sizes_that_differ_a_little_share_buffers():
    """As the tokens of experts do from microbatch to microbatch."""
    buffers = HostBuffers(1 << 20)
    for size in range(1000, 1100):
        buffer = buffers.take(size)
        assert buffer.memory.nbytes >= size
        buffers.give_back(buffer)
    assert buffers.pinned_bytes < 3 * 1280


def test_the_buffer_whose_copy_is_longest_ago_comes_first(pinned):
    """Its last reader has ended, so that a copy to it need not wait."""
    buffers = HostBuffers(1 << 20)
    one, other = buffers.take(1000), buffers.take(1000)
    buffers.give_back(other)
    buffers.give_back(one)
    assert [buffers.take(1000), buffers.take(1000)] == [other, one]


IN_TURN = range(1, 201)
RANDOM = random.Random(0).sample(IN_TURN, 200)


@pytest.mark.parametrize("parts", [IN_TURN, IN_TURN[::-1], RANDOM], ids=["grow", "shrink", "vary"])
def test_sizes_that_no_longer_occur_take_no_room(parts, pinned):
    """Sequences may have another length in every step: four of at most 8 MiB always fit into 64."""
    buffers = HostBuffers(64 * MIB)
    for part in parts:
        held = [buffers.take(8 * MIB * part // 200) for _ in range(4)]
        assert None not in held, part
        assert (
            buffers.pinned_bytes == sum(size for size, memory in pinned if memory() is not None) <= 64 * MIB
        )
        for buffer in held:
            buffer.last_use = Ended()
            buffers.give_back(buffer)


def test_the_least_recently_used_is_released_once_its_copy_has_ended(pinned):
    buffers = HostBuffers(4 * MIB)
    first, second, _ = (buffers.take(MIB) for _ in range(3))
    for buffer in (second, first):
        buffer.last_use = Ended()
        buffers.give_back(buffer)
    assert buffers.take(2 * MIB).memory.nbytes == 2 * MIB
    assert (second.last_use.waits, first.last_use.waits) == (1, 0)
    del second, buffer
    assert [memory() is not None for _, memory in pinned] == [True, False, True, True]
    assert buffers.take(2 * MIB) is None, "only the first is free"
    assert buffers.take(MIB) is first


def test_what_is_reserved_is_pinned_at_once_and_serves_other_sizes_in_the_next_step(pinned):
    buffers = HostBuffers(10 * MIB)
    buffers.reserve(8 * MIB)
    last = None
    for sizes in ([3, 3, 2], [8], [1, 5], [4, 4]):
        held = [buffers.take(size * MIB) for size in sizes]
        for buffer in held:
            assert buffer.last_use is last
        last = Ended()
        for buffer in held:
            buffer.last_use = last
            buffers.give_back(buffer)
    assert [size for size, _ in pinned] == [8 * MIB]
    buffers.reserve(8 * MIB)
    assert [size for size, _ in pinned] == [8 * MIB, 2 * MIB], "no more than the limit"


class Stream:
    """Launches in their order: names of work, and points of other streams that have to be reached before."""

    def __init__(self):
        self.launches = []

    def wait_stream(self, other):
        self.launches.append((other, len(other.launches)))

    def wait_event(self, event):
        self.launches.append(event.point)

    def before(self, end):
        """The names of all work that has ended when the first ``end`` launches have."""
        found = set()
        for launch in self.launches[:end]:
            found |= {launch} if isinstance(launch, str) else launch[0].before(launch[1])
        return found

    def before_work(self, name):
        return self.before(self.launches.index(name))


class Event:
    synchronized = 0

    def record(self, stream):
        self.point = stream, len(stream.launches)

    def synchronize(self):
        Event.synchronized += 1


@pytest.fixture
def compute(monkeypatch):
    """The compute stream of a device whose streams are models."""
    current = [Stream()]

    @contextmanager
    def using(stream):
        current.append(stream)
        yield
        current.pop()

    for name, replacement in (
        ("Stream", Stream),
        ("Event", Event),
        ("stream", using),
        ("current_stream", lambda: current[-1]),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    return current[0]


@contextmanager
def named(name):
    """Put the work ``name`` onto the stream where a recorder would note when a copy begins."""
    torch.cuda.current_stream().launches.append(name)
    yield


def transfer():
    return [Transfer(torch.ones(2), torch.zeros(2))]


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_a_copy_waits_for_what_is_computed_and_nothing_waits_for_it_unasked(way, compute):
    copy = getattr(CopyStreams(), way)
    compute.launches.append("forward")
    done = copy(moved := transfer(), [], named("copy"))
    compute.launches.append("next")
    assert torch.equal(moved[0].target, moved[0].source)
    stream, _ = done._event.point
    assert stream.before_work("copy") == {"forward"}
    assert compute.before_work("next") == {"forward"}
    done.wait()
    compute.launches.append("last")
    assert compute.before_work("last") == {"forward", "copy", "next"}


def test_copies_of_one_way_follow_each_other_and_what_they_are_given(compute):
    engines = CopyStreams()
    first = engines.to_host(transfer(), [], named("out"))
    back = engines.to_device(transfer(), [first], named("back"))
    second = engines.to_host(transfer(), [], named("out again"))
    third = engines.to_host(transfer(), [back], named("out behind"))
    stream, _ = second._event.point
    assert back._event.point[0].before_work("back") == {"out"}
    assert stream.before_work("out again") == {"out"}
    assert stream.before_work("out behind") == {"out", "out again", "back"}
    waits = Event.synchronized
    third.synchronize()
    assert Event.synchronized == waits + 1
