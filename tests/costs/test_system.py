"""Descriptions of machines: look-ups, links, files."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import Link, System, efficiency

PLAIN = {
    "name": "test", "gpus_per_node": 4, "memory_bytes": 1e9,
    "matrix_rates": {"bf16": [[64, 64, 64, 1e12], [4096, 4096, 4096, 9e12]]},
    "copy_bytes_per_second": 1e12,
    "node": {"bytes_per_second": 1e11, "latency_seconds": 0},
    "network": {"bytes_per_second": 1e10, "latency_seconds": 0},
}  # fmt: skip


RATE, COPY = 1e14, 2e12
NODE, NETWORK = Link(1e11, 1e-6), Link(1e10, 1e-5)
RATES = {"bf16": RATE, "fp8": 3 * RATE, "fp32": RATE / 8}
MACHINE = System(
    "test", 4, 80e9, {name: [[64, 64, 64, rate]] for name, rate in RATES.items()}, COPY, NODE, NETWORK,
    peak_rates={"bf16": 4e14, "fp8": 8e14},
)  # fmt: skip


def made(**changed):
    return System.from_json(json.dumps({**PLAIN, **changed}), "here")


@pytest.mark.parametrize("name", system.shipped())
def test_shipped_systems_name_a_source_for_every_figure(name):
    machine = system.read(name)
    for field in ("gpus_per_node", "memory_bytes", "matrix_rates", "peak_rates", "copy_bytes_per_second",
                  "node", "network"):  # fmt: skip
        assert len(machine.sources[field]) > 10
    assert machine.rate("bf16", 4096, 4096, 4096) <= machine.peak("bf16")
    again = System.from_json(machine.to_json(), name)
    assert json.loads(again.to_json()) == json.loads(machine.to_json())


def test_other_collectives_are_measured_by_themselves_within_a_node_alone():
    rows = {"gather": [[2, 1e6, 1e-3], [2, 3e6, 3e-3]], "all_to_all": [[2, 1e6, 5e-3]]}
    machine, plain = made(**rows), made()
    assert machine.gather_seconds(2e6, 2) == pytest.approx(2e-3)
    assert machine.all_to_all_seconds(4e6, 2) == pytest.approx(20e-3)
    assert machine.all_reduce_seconds(2e6, 2) == plain.all_reduce_seconds(2e6, 2)
    for kind in ("gather_seconds", "all_to_all_seconds", "all_reduce_seconds"):
        assert getattr(machine, kind)(2e6, 2, 4) == getattr(plain, kind)(2e6, 2, 4)


def test_links_of_a_node_may_join_the_gpus_of_several() -> None:
    """Of 16 ranks that are 2 apart a domain of 12 has six, and jobs put four of them in each."""
    rack = made(gpus_per_domain=12)
    assert (rack.in_a_node(12, 1), rack.in_a_node(6, 2), rack.in_a_node(16, 2)) == (12, 6, 5)
    assert rack.gather_seconds(1e6, 12) < made().gather_seconds(1e6, 12)
    assert rack.message_link(3, 4) == rack.node
    assert rack.message_link(4, 4) == rack.between_nodes


def test_messages_between_nodes_are_slower_than_rings():
    """Rings across nodes reach the network's whole rate, and single messages what is sustained."""
    machine = made(sustained={"network": 0.25})
    assert machine.link(8, 1).bytes_per_second == 4e10
    assert machine.message_link(2, 4).bytes_per_second == 0.25e10


def test_the_slowest_of_many_gpus_sets_the_pace():
    """The share of each doubling beyond 8 GPUs; networks, and shares that are not given, stay as they are."""
    machine = made(sustained={"clock": 0.8, "network": 0.5, "scale": 0.9})
    assert machine.at_scale(4) is machine.at_scale(8) is machine
    at = machine.at_scale(32)
    assert at.sustained == pytest.approx({"clock": 0.8 * 0.81, "copy": 0.81, "network": 0.5})
    assert at.rate("bf16", 64, 64, 64) == pytest.approx(0.81 * machine.rate("bf16", 64, 64, 64))
    assert at.at_scale(64) is at
    assert made(sustained={"clock": 0.8}).at_scale(1024).sustained == {"clock": 0.8}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes is -1, but must be a number above 0"),
        ({"memory_byte": 1}, "'memory_byte' is unknown: did you mean 'memory_bytes'"),
        ({"node": {"bytes_per_second": 1, "latency_seconds": -1}}, "node: latency_seconds is -1, but"),
        ({"peak_rates": []}, r"peak_rates is \[\], but must be an object"),
        ({"processors": -1}, "processors is -1, but must be a number of 0 or more"),
        ({"kernel_seconds": "x"}, 'kernel_seconds is "x", but must be a finite number'),
        (
            {"sustained": {"bf17": 1}},
            "sustained bf17: 'bf17' is unknown: give one of clock, copy, cast, network, ",
        ),
        ({"sustained": {"copy": 0}}, "sustained: copy is 0, but must be a number above 0"),
        ({"attention_rates": [[1, 2]]}, r"attention_rates: 0 is \[1, 2\], but must be a list of 3"),
        ({"around_loop": {"bf16": -1}}, "around_loop: bf16 is -1, but must be a number of 0 or more"),
        ({"matrix_rates": {}}, "neither bf16 nor fp32"),
        ({"matrix_rates": {"bf16": [[1, 2]]}}, r"matrix_rates bf16: 0 is \[1, 2\], but must be a list of 4"),
        ({"matrix_rates": {**PLAIN["matrix_rates"], "int3": [[1, 1, 1, 1]]}}, "give one of bf16, fp32, fp8"),
    ],
)
def test_what_is_no_description_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        made(**changed)


def test_a_type_without_rates_is_refused_with_those_that_have_some():
    machine = made(matrix_rates={**PLAIN["matrix_rates"], "fp32": [[64, 64, 64, 1e12]]})
    with pytest.raises(ValueError, match="test has no matrix rate for fp8, only bf16 and fp32: add rows"):
        machine.rate("fp8", 64, 64, 64)


def test_what_is_no_json_is_refused_with_what_writes_it():
    with pytest.raises(ValueError, match=r"here: .*write what mpp calibrate writes"):
        System.from_json("{", "here")


def test_unknown_hardware_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--system h10 is neither .* \(did you mean 'h100'\?\)"):
        system.read("h10")


def ring(size, ranks, link=NODE, within=0):
    """A reduce-scatter or an all-gather: each rank sends all parts but one to its neighbour.

    ``within`` of the steps stay within a node, though ``link`` is one between nodes.
    """
    latency = (ranks - 1 - within) * link.latency_seconds + within * NODE.latency_seconds
    return latency + size * (ranks - 1) / ranks / link.bytes_per_second


def test_collectives_take_the_steps_of_a_ring_with_their_latency():
    assert MACHINE.gather_seconds(8e6, 4) == pytest.approx(ring(8e6, 4))
    assert MACHINE.all_reduce_seconds(8e6, 4) == pytest.approx(2 * ring(8e6, 4))
    assert MACHINE.all_to_all_seconds(8e6, 4) == pytest.approx(NODE.seconds(6e6))
    for ranks, size in ((1, 8e6), (4, 0)):
        assert MACHINE.all_reduce_seconds(size, ranks) == MACHINE.all_to_all_seconds(size, ranks) == 0


@pytest.mark.parametrize(
    ("ranks", "stride", "within"), [(8, 1, 6), (6, 1, 4), (4, 2, 2), (3, 2, 1), (4, 4, 0), (2, 3, 0)]
)
def test_a_ring_crosses_into_each_other_node_once(ranks, stride, within):
    """Nodes have four GPUs; an empty message within one takes a tenth of the time of one between them."""
    expected = ring(8e6, ranks, MACHINE.link(ranks, stride), within)
    assert MACHINE.gather_seconds(8e6, ranks, stride) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "stride", "rate"),
    [(4, 1, 1e11), (5, 1, 4e10), (2, 2, 1e11), (2, 4, 1e10), (4, 2, 2e10), (8, 3, 1e10), (2, 8, 1e10)],
)
def test_a_group_is_as_fast_as_its_slowest_part(ranks, stride, rate):
    """Nodes have four GPUs, and each a link of its own into the network."""
    wide = Link(rate, NODE.latency_seconds if rate == 1e11 else NETWORK.latency_seconds)
    assert MACHINE.link(ranks, stride) == wide
    slow_node = replace(MACHINE, node=Link(1.5e10, 0))
    assert slow_node.link(ranks, stride).bytes_per_second == min(1.5e10, rate)


def test_measured_collectives_reach_below_and_beyond_their_rows():
    measured = replace(MACHINE, all_reduce=[[2, 4e6, 3e-3], [2, 1e6, 1e-3], [4, 1e6, 9e-3]])
    for size, seconds in ((1e3, 1e-3), (1e6, 1e-3), (2e6, 1e-3 + 2e-3 / 3), (4e6, 3e-3), (8e6, 6e-3)):
        assert measured.all_reduce_seconds(size, 2) == pytest.approx(seconds)
    assert measured.all_reduce_seconds(1e6, 3) == pytest.approx(2 * ring(1e6, 3))


def test_a_rate_between_rows_is_weighted_by_the_distance_in_logarithms():
    """Half-way between rows is their mean; at a third, the nearer one counts four times."""
    rates = {"bf16": [[16, 16, 16, 1e12], [1024, 1024, 1024, 7e12]]}
    machine = replace(MACHINE, matrix_rates=rates)
    assert machine.rate("bf16", 128, 128, 128) == pytest.approx(4e12)
    assert machine.rate("bf16", 64, 64, 64) == pytest.approx((4 * 1e12 + 7e12) / 5)
    # Thin: 2**18 operations from the first row, 2**6 in the smallest side from the second.
    assert machine.rate("bf16", 16, 2**13, 2**13) == pytest.approx((1e12 + 9 * 7e12) / 10)
    assert machine.peak("bf16") == 4e14
    assert replace(machine, peak_rates={}).peak("bf16") == 7e12


def test_gpus_behind_one_switch_have_a_part_of_the_host_link_each():
    h100 = system.read("h100")
    shared = replace(h100, gpus_per_host_link=2).host_beside_others
    assert shared.bytes_per_second == h100.host.bytes_per_second / 2
    assert h100.host_beside_others == h100.host
    assert replace(h100, host=None).host_beside_others is None


sizes = st.integers(1, 20000)


@given(sizes, sizes, sizes, st.integers(1, 400))
def test_it_is_a_share(m: int, n: int, k: int, processors: int) -> None:
    assert 0 < efficiency(m, n, k, processors) <= 1


@given(sizes, sizes, sizes, st.integers(1, 400))
def test_longer_loops_and_doubled_results_lose_no_efficiency(m: int, n: int, k: int, processors: int) -> None:
    one = efficiency(m, n, k, processors)
    assert efficiency(m, n, 2 * k, processors) >= one
    assert efficiency(2 * m, n, k, processors) >= one * (1 - 1e-12)


def test_shapes_make_no_difference_where_the_processors_are_not_known() -> None:
    assert efficiency(1, 1, 1, 0) == 1


def test_whole_waves_of_whole_tiles_lose_only_the_ends_of_loops() -> None:
    """10 x 10 tiles of 256 x 128 on 100 processors, whose loops have 1,280 steps and 128 around them."""
    assert efficiency(2560, 1280, 1280, 100) == pytest.approx(1280 / 1408)


def test_one_tile_more_than_processors_starts_a_second_wave() -> None:
    """Half of what it leaves idle is lost, unless smaller tiles, each slower by its reuse, lose less."""
    whole, more = efficiency(256 * 100, 128, 65536, 100), efficiency(256 * 101, 128, 65536, 100)
    assert 1.01 / 1.505 * whole <= more < 0.9 * whole


def test_products_of_a_group_are_one_product_of_more_tiles() -> None:
    assert efficiency(256, 128, 1024, 100, groups=50) == pytest.approx(efficiency(256 * 50, 128, 1024, 100))
