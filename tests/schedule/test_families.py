"""Every schedule of the catalogue over a grid of sizes: in order, within memory, and as short as it promises.

A new entry is tested here without another line; what its ``promise`` states is compared exactly.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import ALIASES
from megatron_pp_ext.schedule.families.building_block import Block, unroll
from megatron_pp_ext.schedule.families.phases import order_of
from megatron_pp_ext.schedule.placement import loop, v
from megatron_pp_ext.schedule.simulate import simulate
from reference.published_schedules import MORE_UNIT_COST, UNIT_COST
from tests.support import rounding
from tests.support.torchs import TORCH, torch_schedule

SIZES = sorted({(p, m) for p in (2, 3, 5, 8) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1)})
KINDS = ("F", "IB", "WB")
CUTS = [(name, c) for name, e in catalog.ENTRIES.items() for c in range(1, e.chunks + 3) if e.accepts(c)]
PROMISED = [name for name, entry in catalog.ENTRIES.items() if entry.promise]
SPLIT_ALWAYS = ("zb-h1", "zb-h2", "interleaved-zb", "v-min", "v-half", "v-zb")
PUBLISHED = {name: rows for name, rows in (UNIT_COST | MORE_UNIT_COST).items() if name in catalog.NAMES}
TIMES = [(1, 1, 1, 0), (1, 1.1, 0.7, 0.05), (1, 1, 0.5, 0), (1, 2, 1, 0.1)]


def timed(schedule, times=TIMES[0]):
    forward, i, w, hop = times
    costs = Costs.uniform(schedule.placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)
    return simulate(schedule, costs)


@pytest.mark.parametrize(("name", "chunks"), CUTS)
def test_every_size_is_in_order_and_within_its_bounds(name, chunks):
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
            assert schedule.placement.chunk_of(order[0].stage) == 0, "its weights are gathered first"
        kinds = {action.kind for action in schedule}
        assert kinds >= set("FIW") if catalog.entry(name).splits_backward else kinds == set("FB")
        assert kinds == set("FIW") or name not in SPLIT_ALWAYS
        timeline, placement = timed(schedule), schedule.placement
        bound = lower_bound(placement, m, Costs.unit(placement), timeline.peak_activations)
        assert 3 * chunks * m <= bound <= timeline.makespan * (1 + 1e-9), (p, m)
        assert max(timeline.peak_activations) <= chunks * m


@pytest.mark.parametrize("name", PROMISED)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 11])
def test_the_closed_forms_of_the_entry_hold(name, p):
    promise = catalog.entry(name).promise
    assert all(promise.holds(p, m) for m in (2 * p, 4 * p))
    for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 1, 4 * p}):
        timeline = timed(catalog.build(name, p, m))
        peak = max(timeline.peak_activations)
        assert peak <= promise.peak(p, m), m
        if promise.holds(p, m):
            assert (timeline.makespan, peak) == (promise.makespan(p, m), promise.peak(p, m)), m
        if name in ("zb-h2", "v-zb") and m >= 2 * p:  # no rank waits between its first and its last action
            assert timeline.span == 3 * m * timeline.schedule.placement.chunks


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "v-half", "v-zb", "dualpipe-v"])
@pytest.mark.parametrize("p", [3, 8])
def test_no_bubble_repeats_when_actions_take_different_times(name, p):
    """A microbatch more costs its own work, give or take half a percent and twice a hop."""
    for times in [(10, 10, 5, 0), (10, 11, 7, 1), (11.3, 11.2, 8.1, 0)]:
        few, many = (timed(catalog.build(name, p, m), times) for m in (2 * p, 4 * p))
        work = sum(times[:3]) * few.schedule.placement.chunks
        each = (many.makespan - few.makespan) / (2 * p)
        assert each == pytest.approx(work, abs=0.005 * work + 2 * times[3])


@pytest.mark.parametrize("name", catalog.NAMES)
def test_few_microbatches_leave_no_gross_bubble(name):
    """Each microbatch after the first costs at most a rank's own work on it."""
    chunks = catalog.entry(name).chunks
    has_whole = any(action.kind is Kind.B for action in catalog.build(name, 4, 8))
    for p in (2, 3, 5, 8):
        alone = chunks * p * 3 if has_whole else chunks * p * 2 + 1
        for m in range(1, p + 1):
            assert timed(catalog.build(name, p, m)).makespan <= alone + (m - 1) * 3 * chunks


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedules_are_met(name):
    for p, m, makespan, span, peak in PUBLISHED[name]:
        timeline = timed(catalog.build(name, p, m))
        assert timeline.makespan <= makespan
        assert timeline.span <= span or name in MORE_UNIT_COST
        assert max(timeline.peak_activations) <= peak


DRAWN = {
    # Megatron's warm-up of (p - rank - 1) * 2 + (chunks - 1) * p; m = p is a case like any other.
    ("interleaved", 2, 2): ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    ("interleaved", 2, 4): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("1f1b", 3, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
    ("zb-h1", 3, 4): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
    # DeepSeek's order, the two of a pair one after the other.
    ("dualpipe-v", 2, 5): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4",
    ],
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), DRAWN)
def test_orders_as_they_are_drawn(name, ranks, microbatches):
    orders = catalog.build(name, ranks, microbatches).orders
    assert [" ".join(map(str, order)) for order in orders] == DRAWN[name, ranks, microbatches]


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_takes_any_chunks_and_microbatches(chunks):
    for p, m in SIZES:
        makespan = timed(catalog.build("interleaved", p, m, chunks)).makespan
        whole_groups = -(-m // p) * p
        assert makespan <= 3 * (whole_groups * chunks + p - 1)
        if m == whole_groups:
            assert makespan == 3 * (m * chunks + p - 1)


def test_a_block_that_cannot_get_through_says_so():
    with pytest.raises(ValueError, match=r"no microbatch through 4 ranks that keep 1 chunks each: raise"):
        unroll(Block((1, 1), (1, 1, 1)), 4, 8, cap=1)


def test_a_table_of_phases_is_read_word_by_word():
    """A word takes its chunk's next microbatch, with either spelling of a backward; W takes the oldest."""
    order = order_of([("F0 F1", 2), ("I1 I0", 1), ("W0 B1 B0", 1), ("W", 1), ("F0", -1)], 1, v(2))
    assert " ".join(map(str, order)) == "1F0 2F0 1F1 2F1 2I0 1I0 1W0 2B1 1B1 2W0"


def rounded(ranks, microbatches):
    """Return what a makespan may be multiplied by for its rounding: no path is longer than all actions."""
    return 1 + rounding.relative(2 * 3 * ranks * microbatches, rounding.FLOAT64)


@pytest.mark.parametrize(
    ("theirs", "name", "placement"),
    [
        *((theirs, *ours) for theirs, ours in TORCH.items()),
        ("ScheduleInterleavedZeroBubble", "zb-h1", lambda p: loop(p, 1)),
    ],
)
def test_torch_is_met(theirs, name, placement):
    """What torch offers under the same name takes no less time or memory."""
    for p, m in ((2, 4), (4, 16), (8, 16)):
        reference = torch_schedule(theirs, placement(p), m)
        for times in TIMES:
            ours, other = timed(catalog.build(name, p, m), times), timed(reference, times)
            assert ours.makespan <= other.makespan * rounded(p, m), (m, times)
            assert max(ours.peak_activations) <= max(other.peak_activations), (m, times)


def test_dualpipe_v_pairs_forwards_with_backwards_of_other_microbatches():
    for order in catalog.build("dualpipe-v", 4, 16).orders:
        pairs = list(pairwise(order))
        steady = [(f, b) for f, b in pairs if f.kind is Kind.F and b.kind is Kind.B]
        assert len(steady) >= 2 * 9
        assert sum(f.microbatch > b.microbatch for f, b in steady) >= len(steady) - 1


@pytest.mark.parametrize("alias", ALIASES)
def test_the_names_of_others_are_understood(alias):
    assert alias not in catalog.NAMES
    assert catalog.entry(alias).name == ALIASES[alias]
    assert catalog.build(alias, 4, 8) == catalog.build(ALIASES[alias], 4, 8)


@pytest.mark.parametrize("name", ["seq1f1b", "group-interleaved"])
def test_what_is_not_offered_says_why(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not offered here: .*use v-half") as error:
        catalog.entry(name)
    assert "\n" not in str(error.value)


Formula = Callable[[int, int], float]

FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "gpipe": (lambda p, m: 3 * (m + p - 1), lambda p, m: m),
    "1f1b": (lambda p, m: 3 * (m + p - 1), lambda p, m: p),
    "interleaved": (lambda p, m: 3 * m + 3 * (p - 1) / 2, lambda p, m: (3 * p - 1) / 2),
    "breadth-first": (lambda p, m: 3 * m + 3 * (p - 1) / 2, lambda p, m: m),
    "1f1b-v": (lambda p, m: 3 * m + (5 * p - (9, 5, 7)[p % 3]) / 2, lambda p, m: (2 * p + 3) // 3),
    "zb-h1": (lambda p, m: 3 * m + p - 1, lambda p, m: p),
    "zb-h2": (lambda p, m: 3 * m + p - 1, lambda p, m: 2 * p - 1),
    "interleaved-zb": (lambda p, m: 3 * m + (p - 1) / 2, lambda p, m: p),
    "v-min": (lambda p, m: 3 * m + (4 * p - (7, 5, 9)[p % 3]) / 2, lambda p, m: (p + 4) // 3),
    "v-half": (lambda p, m: 3 * m + (3 * p - (7, 4)[p % 2]) / 2, lambda p, m: (p + 2) // 2),
    "v-zb": (lambda p, m: 3 * m + (p - 1) / 2, lambda p, m: p),
    "dualpipe-v": (lambda p, m: 3 * m + (p - 1) / 2, lambda p, m: p + 1 / 2),
}
"""Makespan and the peak of the fullest rank, in microbatches, of schedules with their usual chunks."""

PAIRS = {
    ("1f1b", 16): ((130.2, 121.8, 113.4, 105.0), 16),
    ("interleaved", 16): ((111.8, 105.4, 98.9, 92.5), 12),
    ("dualpipe-v", 16): ((109.8, 103.4, 96.9, 90.5), 8.5),
    ("1f1b", 32): ((220.6, 203.2, 185.9, 168.5), 16),
    ("interleaved", 32): ((203.0, 187.6, 172.2, 156.8), 12),
    ("dualpipe-v", 32): ((200.8, 185.4, 170.0, 154.6), 8.5),
}
"""Makespans on 8 ranks for the pair times 1, 0.9, 0.8 and 0.7, and the peak, in microbatches."""


def test_every_schedule_has_a_formula() -> None:
    assert FORMULAS.keys() == set(catalog.NAMES)


@pytest.mark.parametrize("name", FORMULAS)
def test_makespan_and_peak(name: str) -> None:
    makespan, peak = FORMULAS[name]
    for p, m in ((4, 8), (5, 15), (7, 14), (8, 16), (9, 27)):
        timeline = simulate(catalog.build(name, p, m), Costs.per_rank(p, catalog.entry(name).chunks))
        assert timeline.makespan == pytest.approx(makespan(p, m)), (p, m)
        assert max(timeline.peak_microbatches) == peak(p, m), (p, m)


@pytest.mark.parametrize(("name", "microbatches"), PAIRS)
def test_makespans_of_pairs(name: str, microbatches: int) -> None:
    schedule = catalog.build(name, 8, microbatches, paired=True)
    costs = of_a_rank(schedule.placement.chunks)
    makespans, peak = PAIRS[name, microbatches]
    found = [simulate(schedule, replace(costs, pair=pair)).makespan for pair in (1.0, 0.9, 0.8, 0.7)]
    assert found == pytest.approx(makespans, abs=0.05)
    assert max(simulate(schedule, costs).peak_microbatches) == peak


def test_v_zb_has_no_pairs_at_the_same_costs() -> None:
    found = [simulate(catalog.build("v-zb", 8, m), of_a_rank(2)).makespan for m in (16, 32)]
    assert found == pytest.approx([98.9, 188.5], abs=0.05)


def of_a_rank(chunks: int) -> Costs:
    return Costs.per_rank(8, chunks, forward=2, input_gradient=2.2, weight_gradient=1.4, hop=0.05)
