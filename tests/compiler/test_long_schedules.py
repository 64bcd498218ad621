"""What one more microbatch takes in the middle of a long schedule, beside a block that is repeated."""

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v

SHORT = 2212
"""The length with 32 microbatches (docs/compiler.md, p = 8, limit 8)."""

BLOCK = 61.3
"""What each microbatch takes where eight of them are one block that is repeated."""


def test_a_long_schedule_needs_no_blocks_of_microbatches(monkeypatch, tmp_path):
    """64 microbatches take no longer than the schedule for 32 with four blocks in its middle."""
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    costs = Costs.uniform(v(8), forward=10, input_gradient=11, weight_gradient=7, hop=1)
    found = compile_schedule(8, 64, costs, 8.0, placements=[v(8)], trials=300)
    assert found.timeline.makespan <= SHORT + 32 * BLOCK
