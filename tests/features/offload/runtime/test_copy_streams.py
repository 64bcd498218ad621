"""What a copy waits for, and what waits for it, by a model of a device's streams."""

from contextlib import contextmanager

import pytest
import torch

from megatron_pp_ext.features.offload.runtime.host_buffers import CopyStreams, Transfer


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
