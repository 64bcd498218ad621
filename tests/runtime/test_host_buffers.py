"""Buffers of the host: used again by size, and never more than the limit."""

import pytest

from megatron_pp_ext.runtime.host_buffers import HostBuffers


def test_a_buffer_is_used_again():
    buffers = HostBuffers(1000)
    one = buffers.take(600)
    assert one.memory.nbytes >= 600
    assert buffers.take(600) is None, "that would be 1200 bytes"
    buffers.give_back(one)
    assert buffers.take(590) is one
    assert (buffers.used_bytes, buffers.pinned_bytes) == (one.memory.nbytes, one.memory.nbytes)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1024, 1025, 3 << 20, (1 << 30) + 1])
def test_an_eighth_of_a_buffer_at_most_is_not_used(size, monkeypatch):
    taken = []
    monkeypatch.setattr("megatron_pp_ext.runtime.host_buffers._pinned", lambda of: taken.append(of))
    monkeypatch.setattr("megatron_pp_ext.runtime.host_buffers._size", lambda buffer: taken[-1])
    HostBuffers(2 * size).take(size)
    assert size <= taken[0] <= size * 9 / 8


def test_sizes_that_differ_a_little_share_buffers():
    """As the tokens of experts do from microbatch to microbatch."""
    buffers = HostBuffers(1 << 20)
    for size in range(1000, 1100):
        buffer = buffers.take(size)
        assert buffer.memory.nbytes >= size
        buffers.give_back(buffer)
    assert buffers.pinned_bytes < 3 * 1280


def test_a_larger_buffer_serves_where_there_is_no_room_for_another():
    buffers = HostBuffers(1500)
    large = buffers.take(1000)
    buffers.give_back(large)
    small = buffers.take(400)
    assert small is not large
    assert buffers.take(300) is large
    assert buffers.take(300) is None
    buffers.give_back(small)
    assert buffers.take(1000) is None, "it is too small"
