"""Schedules of steps with another number of microbatches than the ordinary one."""

from dataclasses import replace

from megatron_pp_ext.compiler import compile as compiler
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import at_most
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import v
from megatron_pp_ext.schedule.simulate import simulate
from tests.conftest import CACHE

COSTS = Costs.uniform(v(4), forward=10, input_gradient=11, weight_gradient=7, hop=1)


def test_another_number_of_microbatches_takes_a_fraction_of_the_trials(monkeypatch, tmp_path) -> None:
    """Each is searched for once, with one result for all ranks, and no family within the limit is shorter."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    searched, search = [], compiler._shortest
    monkeypatch.setattr(compiler, "_shortest", lambda *inputs: searched.append(inputs[-1]) or search(*inputs))
    request = replace(named("flex", 4, 8, limit=0.75), placements=(v(4),), trials=80)
    source = Source(request, CostModel.fixed(COSTS))
    limits = request.budget(COSTS).ranks
    for microbatches in (7, 9, 7, 8, 23):
        found = simulate(source.schedule(microbatches), COSTS)
        assert all(map(at_most, found.peak_memory, limits))
        for family in ("v-min", "v-half", "v-zb"):
            published = simulate(catalog.build(family, 4, microbatches), COSTS)
            if all(map(at_most, published.peak_memory, limits)):
                assert found.makespan <= published.makespan
    assert searched == [80, 10, 10, 10]
    monkeypatch.setenv(CACHE, str(tmp_path / "of another rank"))
    other = Source(request, CostModel.fixed(COSTS))
    assert other.schedule(9).digest == source.schedule(9).digest


SHORT = 2212
"""The length with 32 microbatches (benchmarks/results/compiled.md, p = 8, limit 8)."""

BLOCK = 61.3
"""What each microbatch takes where eight of them are one block that is repeated."""


def test_a_long_schedule_needs_no_blocks_of_microbatches(monkeypatch, tmp_path):
    """64 microbatches take no longer than the schedule for 32 with four blocks in its middle."""
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    costs = Costs.uniform(v(8), forward=10, input_gradient=11, weight_gradient=7, hop=1)
    found = compile_schedule(8, 64, costs, 8.0, placements=[v(8)], trials=300)
    assert found.timeline.makespan <= SHORT + 32 * BLOCK
