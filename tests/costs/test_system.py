"""Descriptions of machines: look-ups, links, files."""

import json
from dataclasses import replace

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import Link, System

PLAIN = {
    "name": "test", "gpus_per_node": 4, "memory_bytes": 1e9,
    "matrix_rates": {"bf16": [[64, 64, 64, 1e12], [4096, 4096, 4096, 9e12]]},
    "copy_bytes_per_second": 1e12,
    "node": {"bytes_per_second": 1e11, "latency_seconds": 0},
    "network": {"bytes_per_second": 1e10, "latency_seconds": 0},
}  # fmt: skip


def made(**changed):
    return System.from_json(json.dumps({**PLAIN, **changed}), "here")


@pytest.mark.parametrize("name", system.shipped())
def test_shipped_systems_name_a_source_for_every_figure(name):
    machine = system.read(name)
    for field in ("gpus_per_node", "memory_bytes", "matrix_rates", "peak_rates", "copy_bytes_per_second",
                  "node", "network"):  # fmt: skip
        assert len(machine.sources[field]) > 10
    assert machine.rate("bf16", 4096, 4096, 4096) <= machine.peak("bf16")
    assert System.from_json(machine.to_json(), name) == machine


def test_rates_are_exact_at_rows_and_between_them_elsewhere():
    machine = made()
    assert machine.rate("bf16", 64, 64, 64) == 1e12
    assert machine.rate("bf16", 4096, 4096, 4096) == 9e12
    assert 1e12 < machine.rate("bf16", 512, 512, 512) < 9e12
    # Long, but thin: nearer to the small product than the square one of as many operations.
    assert machine.rate("bf16", 64, 4096, 4096) < machine.rate("bf16", 1024, 1024, 1024)


def test_groups_across_nodes_share_their_nodes_links():
    machine = made()
    assert machine.link(4, 1) == machine.node
    assert machine.link(8, 1).bytes_per_second == 4e10
    assert machine.link(2, 4) == Link(1e10, 0)
    # Each of four ranks sends three quarters twice.
    assert machine.all_reduce_seconds(4e9, 4) == pytest.approx(2 * 3e9 / 1e11)
    assert machine.gather_seconds(4e9, 4) == pytest.approx(3e9 / 1e11)


def test_measured_all_reduces_win():
    machine = made(all_reduce=[[2, 1e6, 1e-3], [2, 1.5e6, 1.2e-3], [2, 3e6, 2e-3]])
    assert machine.all_reduce_seconds(0.5e6, 2) == pytest.approx(1e-3)
    assert machine.all_reduce_seconds(2.25e6, 2) == pytest.approx(1.6e-3)
    assert machine.all_reduce_seconds(6e6, 2) == pytest.approx(4e-3)


def test_other_collectives_are_measured_by_themselves_within_a_node_alone():
    rows = {"gather": [[2, 1e6, 1e-3], [2, 3e6, 3e-3]], "all_to_all": [[2, 1e6, 5e-3]]}
    machine, plain = made(**rows), made()
    assert machine.gather_seconds(2e6, 2) == pytest.approx(2e-3)
    assert machine.all_to_all_seconds(4e6, 2) == pytest.approx(20e-3)
    assert machine.all_reduce_seconds(2e6, 2) == plain.all_reduce_seconds(2e6, 2)
    for kind in ("gather_seconds", "all_to_all_seconds", "all_reduce_seconds"):
        assert getattr(machine, kind)(2e6, 2, 4) == getattr(plain, kind)(2e6, 2, 4)


def test_messages_between_nodes_are_slower_than_rings():
    """Rings across nodes reach the network's whole rate, and single messages what is sustained."""
    machine = made(sustained={"network": 0.25})
    assert machine.link(8, 1).bytes_per_second == 4e10
    assert machine.message_link(2, 4).bytes_per_second == 0.25e10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes is -1, but must be a number above 0"),
        ({"memory_byte": 1}, "'memory_byte' is unknown: did you mean 'memory_bytes'"),
        (
            {"node": {"bytes_per_second": 1, "latency_seconds": -1}},
            "node: latency_seconds is -1, but",
        ),
        ({"peak_rates": []}, r"peak_rates is \[\], but must be an object"),
        ({"processors": -1}, "processors is -1, but must be a number of 0 or more"),
        ({"kernel_seconds": "x"}, 'kernel_seconds is "x", but must be a finite number'),
        ({"sustained": {"bf17": 1}}, "sustained bf17: 'bf17' is unknown: give one of clock, copy, network"),
        ({"sustained": {"copy": 0}}, "sustained: copy is 0, but must be a number above 0"),
        ({"attention_rates": [[1, 2]]}, r"attention_rates: 0 is \[1, 2\], but must be a list of 3"),
        ({"around_loop": {"bf16": -1}}, "around_loop: bf16 is -1, but must be a number of 0 or more"),
        ({"matrix_rates": {}}, "neither bf16 nor fp32"),
        ({"matrix_rates": {"bf16": [[1, 2]]}}, r"matrix_rates bf16: 0 is \[1, 2\], but must be a list of 4"),
        (
            {"matrix_rates": {**PLAIN["matrix_rates"], "int3": [[1, 1, 1, 1]]}},
            "give one of bf16, fp32, fp8",
        ),
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


def test_gpus_behind_one_switch_have_a_part_of_the_host_link_each():
    h100 = system.read("h100")
    shared = replace(h100, gpus_per_host_link=2).host_beside_others
    assert shared.bytes_per_second == h100.host.bytes_per_second / 2
    assert h100.host_beside_others == h100.host
    assert replace(h100, host=None).host_beside_others is None
