"""Every schedule of the catalogue over a grid of sizes: in order, within memory, and as short as it promises.

A new entry is tested here without another line; what its ``promise`` states is compared exactly.
"""

import pytest

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.families.building_block import Block, unroll
from megatron_pp_ext.schedule.families.phases import order_of
from megatron_pp_ext.schedule.placement import v
from megatron_pp_ext.schedule.simulate import simulate
from reference.published_schedules import UNIT_COST

SIZES = sorted({(p, m) for p in (2, 3, 4, 5, 8) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1)})
LONG = [(p, m) for p in (2, 3, 4, 5, 6, 7, 8, 11, 16) for m in (2 * p, 2 * p + 1, 4 * p)]
KINDS = ("F", "IB", "WB")
CUTS = [(name, c) for name, e in catalog.ENTRIES.items() for c in range(1, e.chunks + 3) if e.accepts(c)]
PROMISED = [name for name, entry in catalog.ENTRIES.items() if entry.promise]


def timed(name, ranks, microbatches, chunks=None):
    schedule = catalog.build(name, ranks, microbatches, chunks)
    return simulate(schedule, Costs.unit(schedule.placement))


@pytest.mark.parametrize(("name", "chunks"), CUTS)
def test_every_stage_keeps_microbatch_order(name, chunks):
    """Messages have no tags and gradients are summed as they come: order is part of the result."""
    for p, m in SIZES:
        schedule = catalog.build(name, p, m, chunks)
        for rank, order in enumerate(schedule.orders):
            done = {(stage, kinds): [] for stage in schedule.placement.stages_of(rank) for kinds in KINDS}
            for stage, kind, microbatch in order:
                for kinds in KINDS:
                    if kind in kinds:
                        done[stage, kinds].append(microbatch)
            assert all(found == list(range(m)) for found in done.values()), (p, m, rank)


@pytest.mark.parametrize(("name", "chunks"), CUTS)
def test_whole_and_split_backwards_are_those_of_the_entry(name, chunks):
    for p, m in SIZES:
        kinds = {action.kind for action in catalog.build(name, p, m, chunks)}
        assert kinds >= set("FIW") if catalog.entry(name).splits_backward else kinds == set("FB")


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "v-min", "v-half", "v-zb"])
def test_zero_bubble_families_split_every_backward(name):
    assert {action.kind for action in catalog.build(name, 4, 8)} == set("FIW")


@pytest.mark.parametrize(("name", "chunks"), CUTS)
def test_no_schedule_is_shorter_than_its_lower_bound(name, chunks):
    for p, m in SIZES:
        timeline = timed(name, p, m, chunks)
        placement = timeline.schedule.placement
        bound = lower_bound(placement, m, Costs.unit(placement), timeline.peak_activations)
        assert 3 * chunks * m <= bound <= timeline.makespan * (1 + 1e-9), (p, m)
        assert max(timeline.peak_activations) <= chunks * m


@pytest.mark.parametrize("name", PROMISED)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_the_closed_forms_of_the_entry_hold(name, p):
    promise = catalog.entry(name).promise
    assert all(promise.holds(p, m) for m in (2 * p, 4 * p))
    for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 1, 4 * p}):
        timeline = timed(name, p, m)
        peak = max(timeline.peak_activations)
        assert peak <= promise.peak(p, m), m
        if promise.holds(p, m):
            assert (timeline.makespan, peak) == (promise.makespan(p, m), promise.peak(p, m)), m


@pytest.mark.parametrize("name", ["zb-h2", "v-zb"])
def test_no_rank_waits_between_its_first_and_its_last_action(name):
    for p, m in LONG:
        timeline = timed(name, p, m)
        assert timeline.span == 3 * m * timeline.schedule.placement.chunks


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "v-half", "v-zb", "dualpipe-v"])
@pytest.mark.parametrize("p", [3, 4, 6, 8])
@pytest.mark.parametrize("times", [(10, 10, 5, 0), (10, 11, 7, 1), (11.3, 11.2, 8.1, 0)])
def test_no_bubble_repeats_when_actions_take_different_times(name, p, times):
    """A microbatch more costs its own work, give or take half a percent and twice a hop."""
    forward, i, w, hop = times
    lengths = []
    for m in (2 * p, 4 * p):
        schedule = catalog.build(name, p, m)
        costs = Costs.uniform(
            schedule.placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop
        )
        lengths.append(simulate(schedule, costs).makespan)
    work = (forward + i + w) * schedule.placement.chunks
    assert (lengths[1] - lengths[0]) / (2 * p) == pytest.approx(work, abs=0.005 * work + 2 * hop)


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_few_microbatches_leave_no_gross_bubble(name, p):
    """Each microbatch after the first costs at most a rank's own work on it."""
    chunks = catalog.entry(name).chunks
    has_whole = any(action.kind is Kind.B for action in catalog.build(name, 4, 8))
    alone = chunks * p * 3 if has_whole else chunks * p * 2 + 1
    for m in range(1, p + 1):
        allowed = alone + (m - 1) * 3 * chunks
        assert timed(name, p, m).makespan <= allowed


@pytest.mark.parametrize("name", UNIT_COST)
def test_published_schedules_are_met(name):
    for p, m, makespan, span, peak in UNIT_COST[name]:
        timeline = timed(name, p, m)
        assert timeline.makespan <= makespan
        assert timeline.span <= span
        assert max(timeline.peak_activations) <= peak


def test_interleaved_has_megatrons_order():
    """Warm-up (p - rank - 1) * 2 + (chunks - 1) * p, groups of p; m = p is a case like any other."""
    assert [" ".join(map(str, order)) for order in catalog.build("interleaved", 2, 2).orders] == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert [" ".join(map(str, order)) for order in catalog.build("interleaved", 2, 4).orders] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_interleaved_takes_any_chunks_and_microbatches(p, chunks):
    for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1):
        timeline = timed("interleaved", p, m, chunks)
        whole_groups = -(-m // p) * p
        assert timeline.makespan <= 3 * (whole_groups * chunks + p - 1)
        if m == whole_groups:
            assert timeline.makespan == 3 * (m * chunks + p - 1)


def test_1f1b_and_zb_h1_as_drawn():
    assert [" ".join(map(str, order)) for order in catalog.build("1f1b", 3, 3).orders] == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]
    assert [" ".join(map(str, order)) for order in catalog.build("zb-h1", 3, 4).orders] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_a_block_that_cannot_get_through_says_so():
    with pytest.raises(ValueError, match=r"no microbatch through 4 ranks that keep 1 chunks each: raise"):
        unroll(Block((1, 1), (1, 1, 1)), 4, 8, cap=1)


def test_a_table_of_phases_is_read_word_by_word():
    """A word takes its chunk's next microbatch, with either spelling of a backward; W takes the oldest."""
    order = order_of([("F0 F1", 2), ("I1 I0", 1), ("W0 B1 B0", 1), ("W", 1), ("F0", -1)], 1, v(2))
    assert " ".join(map(str, order)) == "1F0 2F0 1F1 2F1 2I0 1I0 1W0 2B1 1B1 2W0"
