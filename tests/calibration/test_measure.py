"""Figures of a machine from times that are known."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.calibration import measure, ranks
from megatron_pp_ext.costs import system

CPU = torch.device("cpu")
SECONDS, LATENCY = 0.25, 0.001
ALONE = {"matrix_rates": {"fp32": [(8.0, 8.0, 8.0, 1e9)]}, "copy_bytes_per_second": 1e9}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product and copy takes a quarter of a second."""

    def seconds_of(action: Callable[[], object], device: torch.device) -> float:
        action()
        return SECONDS

    monkeypatch.setattr(measure, "seconds_of", seconds_of)


def test_a_product_has_two_operations_for_each_term(timed: None) -> None:
    assert measure.matrix_rate(torch.float32, (3, 5, 7), CPU) == 2 * 3 * 5 * 7 / SECONDS


def test_a_copy_reads_and_writes(timed: None) -> None:
    assert measure.copy_rate(CPU) == 2 * 2**26 / SECONDS


def test_two_lengths_tell_attention_s_rate_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query takes a microsecond for each of the half of all keys that it sees, and for 100 more."""
    monkeypatch.setattr(measure, "_attention", lambda length, device: 1e-6 * length * (length / 2 + 100))
    [(width, rate, keys)] = measure.attention_rates(CPU)
    assert (width, keys) == (measure.ATTENTION_WIDTH, pytest.approx(100))
    assert rate == pytest.approx(4 * measure.ATTENTION_WIDTH * measure.ATTENTION_HEADS / 1e-6)
    monkeypatch.setattr(measure, "_attention", lambda length, device: 1e-6 * length)
    assert measure.attention_rates(CPU) == []


@pytest.mark.parametrize(("bf16", "rows"), [(0.4, 1), (0.6, len(measure.CPU_SHAPES))])
def test_a_format_that_is_slower_than_fp32_has_one_row(bf16, rows, monkeypatch):
    rates = {torch.float32: 1.0, torch.bfloat16: bf16}
    monkeypatch.setattr(measure, "matrix_rate", lambda dtype, shape, device: rates[dtype])
    found = dict(measure.matrix_rates(CPU))
    assert (len(found["fp32"]), len(found["bf16"])) == (len(measure.CPU_SHAPES), rows)


def test_a_message_is_half_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large one takes beyond a tiny one goes by its bytes."""
    both_ways = {4: 2 * LATENCY, measure.MESSAGE_BYTES: 2 * (LATENCY + 0.5)}
    monkeypatch.setattr(measure, "_round_trip", lambda size, count, device: both_ways[size])
    link = measure.message(CPU)
    assert (link.latency_seconds, link.bytes_per_second) == (
        LATENCY,
        pytest.approx(2 * measure.MESSAGE_BYTES),
    )


def test_copies_to_the_host_take_a_latency_and_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: LATENCY, measure.HOST_BYTES: LATENCY + 0.5}
    monkeypatch.setattr(measure, "_both_ways", lambda size, device: seconds[size])
    link = measure.host_link(CPU)
    assert link.latency_seconds == LATENCY
    assert link.bytes_per_second == pytest.approx(2 * measure.HOST_BYTES)
    found = {**ALONE, "host": link}
    described = ranks.described_system(found, 1, False, system.read("h100"))
    assert described.host == link
    assert described.sources["host"].endswith("both ways at once")


def test_the_first_times_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They make connections and pages."""
    durations = [9.0, 8.0, 0.5, 0.25, 1.0]
    clock = {"now": 0.0}

    def act() -> None:
        clock["now"] += durations.pop(0)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    assert measure._median_of(3, act, CPU) == 0.5
    assert not durations


def test_groups_are_of_powers_of_two_and_of_all() -> None:
    assert measure.group_sizes(2) == [2]
    assert measure.group_sizes(6) == [2, 4, 6]
    assert measure.group_sizes(8) == [2, 4, 8]


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=64 * 2**30))
    monkeypatch.setattr(ranks, "psutil", memory)
    found = {**ALONE, "node": system.Link(2e9, LATENCY), "gather": [(2.0, 1024.0, 0.1)]}
    described = ranks.described_system(found, 4, False, None)
    assert described.memory_bytes == 16 * 2**30
    assert (described.gpus_per_node, described.node) == (4, described.network)
    assert (described.node.bytes_per_second, described.node.latency_seconds) == (2e9, LATENCY)
    assert (described.gather, described.all_reduce) == ([(2.0, 1024.0, 0.1)], ())
