"""All families over a grid of sizes: complete, in order, within memory, and as short as published."""

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.families.building_block import Block, unroll
from megatron_pp_ext.schedule.simulate import simulate
from reference.published_schedules import UNIT_COST

SIZES = sorted({(p, m) for p in (2, 3, 4, 5, 8) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1)})
LONG = [(p, m) for p in (2, 3, 4, 5, 6, 7, 8, 11, 16) for m in (2 * p, 2 * p + 1, 4 * p)]

WHOLE = ("gpipe", "breadth-first", "1f1b", "interleaved", "1f1b-v")
KEEP_ALL = ("gpipe", "breadth-first")


def timed(name, ranks, microbatches, chunks=None):
    schedule = catalog.build(name, ranks, microbatches, chunks)
    return simulate(schedule, Costs.unit(schedule.placement))


def peak_of(name, p):
    """The most chunks a rank may keep, whatever m is."""
    return {
        "1f1b": p,
        "1f1b-v": 2 * ((2 * p + 3) // 3),
        "interleaved": 3 * p - 1,
        "interleaved-zb": 2 * p,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "v-min": 2 * ((p + 4) // 3),
        "v-half": 2 * ((p + 2) // 2),
        "v-zb": 2 * p,
        "dualpipe-v": 2 * p + 1,
    }[name]


def makespan_of(name, p, m):
    """Closed forms at unit cost for m >= 2p."""
    return {
        "gpipe": 3 * (m + p - 1),
        "1f1b": 3 * (m + p - 1),
        "1f1b-v": 6 * m + {2: 4, 3: 8, 6: 22}.get(p, 5 * p - (9, 5, 7)[p % 3]),
        "breadth-first": 6 * m + 3 * (p - 1),
        "interleaved": 6 * m + 3 * (p - 1),
        "interleaved-zb": 6 * m + p - 1,
        "zb-h1": 3 * m + p - 1,
        "zb-h2": 3 * m + p - 1,
        "v-min": 6 * m + 1 if p == 2 else 6 * m + 4 * p - (7, 5, 9)[p % 3],
        "v-half": 6 * m + 1 if p == 2 else 6 * m + 3 * p - (7, 4)[p % 2],
        "v-zb": 6 * m + p - 1,
        "dualpipe-v": 6 * m + p - 1,
    }[name]


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_stage_keeps_microbatch_order(name, p, m):
    """Messages have no tags and gradients are summed as they come: order is part of the result."""
    schedule = catalog.build(name, p, m)
    for rank, order in enumerate(schedule.orders):
        for stage in schedule.placement.stages_of(rank):
            for kinds in ("F", "IB", "WB"):
                assert [a.microbatch for a in order if a.stage == stage and a.kind in kinds] == list(range(m))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_only_whole_backwards_where_no_weight_gradient_can_be_deferred(name):
    kinds = {action.kind for action in catalog.build(name, 4, 8)}
    if name in WHOLE:
        assert kinds == set("FB")
    else:
        assert kinds == set("FIWB" if name == "dualpipe-v" else "FIW")


@pytest.mark.parametrize("name", [name for name in catalog.NAMES if name not in KEEP_ALL])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_holds_for_any_number_of_microbatches(name, p, m):
    timeline = timed(name, p, m)
    chunks = timeline.schedule.placement.chunks
    assert max(timeline.peak_activations) <= min(peak_of(name, p), chunks * m)


@pytest.mark.parametrize(
    ("name", "p", "m"),
    # Interleaved ones have no closed form where p does not divide m.
    [(name, p, m) for name in catalog.NAMES for p, m in LONG if "interleaved" not in name or m % p == 0],
)
def test_closed_forms(name, p, m):
    timeline = timed(name, p, m)
    assert timeline.makespan == makespan_of(name, p, m)
    if name in ("zb-h2", "v-zb"):
        assert timeline.span == 3 * m * timeline.schedule.placement.chunks
    if name in KEEP_ALL:
        assert max(timeline.peak_microbatches) == m
    else:
        assert max(timeline.peak_activations) == peak_of(name, p)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "v-half", "v-zb"])
@pytest.mark.parametrize("p", [3, 4, 5, 8])
def test_closed_forms_already_hold_from_p_microbatches_on(name, p):
    for m in range(p, 2 * p):
        assert timed(name, p, m).makespan == makespan_of(name, p, m)


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
    chunks = catalog.ENTRIES[name].chunks
    whole = name in (*WHOLE, "dualpipe-v")
    alone = chunks * p * (3 if whole else 2) + (0 if whole else 1)
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
