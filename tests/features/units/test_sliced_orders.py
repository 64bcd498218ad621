"""Orders of slices: families keep their shape, list scheduling keeps limits and never gets stuck."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.features.pairs.order import request_in_pairs
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import OVERHEAD, LengthCosts, StageRates
from megatron_pp_ext.features.units.units import (
    cut,
    cut_at,
    more,
    named_units,
    ordered,
    require_chain_order,
    shifted,
)
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import CostModel, Costs, SequenceMemory, UnitCosts
from megatron_pp_ext.schedule.placement import Placement, linear, loop, v
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from tests.support.ranks import run_ranks
from tests.support.unit_stages import steps_of

NAMES = [name for name, entry in catalog.ENTRIES.items() if entry.chunks <= 2]
DOCUMENTS = some.lists(some.lists(some.integers(1, 900), min_size=1, max_size=4), min_size=1, max_size=5)
PLACEMENTS = some.sampled_from([linear(2), linear(3), v(2), v(3), loop(3, 2)])


def step(name: str, ranks: int, microbatches: int, slices: int) -> Timeline:
    """The step with so many slices, whose rank does F, I and W of a microbatch in 1 each."""
    request = named(name, ranks, microbatches)
    costs = Costs.per_rank(ranks, request.placement.chunks)
    schedule = make(request.with_option(equal(slices)), CostModel.fixed(costs)).schedule
    return simulate(schedule, of_equal(costs, slices, schedule) if schedule.units else costs)


def equal(slices: int) -> Slices:
    """So many slices of each sequence, of one token each, whose attention does not count."""
    return Slices(1, slices, overhead=0.0, equal_at=inf)


def of_equal(costs: Costs, slices: int, schedule: Schedule) -> UnitCosts:
    """The costs of the slices of ``schedule``, where ``costs`` are those of a microbatch."""
    return LengthCosts.measured(costs, slices, 1, inf).of(named_units(schedule.units))


def shifted_step(name: str, ranks: int, microbatches: int, slices: int) -> Timeline:
    """The same in the family's own order."""
    request = named(name, ranks, microbatches)
    costs = Costs.per_rank(ranks, request.placement.chunks)
    units = cut_at([list(range(slices + 1))] * microbatches)
    chunks = request.placement.chunks
    schedule = shifted(catalog.build(name, ranks, len(units) + more(units), chunks), units)
    return simulate(schedule, of_equal(costs, slices, schedule))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches", "slices"), [(2, 1, 2), (4, 6, 3), (3, 4, 4)])
def test_families_take_slices_in_order_and_back_in_reverse(name, ranks, microbatches, slices) -> None:
    units = cut_at([list(range(slices + 1))] * microbatches)
    schedule = make(named(name, ranks, microbatches).with_option(equal(slices))).schedule
    assert schedule.whole_microbatches == microbatches and schedule.microbatches == len(units)
    require_chain_order(schedule, units)


@given(some.sampled_from(NAMES), some.integers(2, 4), DOCUMENTS, some.integers(50, 900), some.randoms())
@settings(max_examples=40, deadline=None)
def test_families_take_unlike_units_in_any_order_of_chains(name, ranks, documents, most, random) -> None:
    units = cut(documents, most)
    chains = list(range(len(units.chains)))
    random.shuffle(chains)
    units = ordered(units, chains)
    schedule = shifted(catalog.build(name, ranks, len(units) + more(units)), units)
    check(schedule)
    require_chain_order(schedule, units)


def test_1f1b_in_slices_is_seq1f1b() -> None:
    """Rank 0 keeps p + k - 1 slices, and each rank's bubble is that of p - 1 slices (arXiv 2406.03488)."""
    for ranks, microbatches, slices in ((4, 8, 2), (8, 8, 4)):
        timeline = shifted_step("1f1b", ranks, microbatches, slices)
        assert max(timeline.peak_microbatches) == pytest.approx((ranks + slices - 1) / slices)
        assert timeline.makespan == pytest.approx(3 * (microbatches + (ranks - 1) / slices))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches", "slices"), [(4, 4, 4), (3, 5, 3), (4, 12, 2)])
def test_a_family_is_never_longer_nor_fuller_than_its_own_order(name, ranks, microbatches, slices) -> None:
    ours, own = (take(name, ranks, microbatches, slices) for take in (step, shifted_step))
    assert ours.makespan <= own.makespan + 1e-9
    for peak, of_family in zip(ours.peak_activations, own.peak_activations, strict=True):
        assert peak <= of_family * (1 + 1e-6)


def test_v_half_in_slices_is_shorter_and_keeps_less() -> None:
    whole, sliced = step("v-half", 8, 8, 1), step("v-half", 8, 8, 4)
    assert sliced.makespan < 0.85 * whole.makespan
    assert max(sliced.peak_microbatches) < 0.5 * max(whole.peak_microbatches)


def test_flex_keeps_the_limit_and_is_no_longer_than_the_families() -> None:
    for limit in (0.25, 0.5):
        request = named("flex", 4, 6, limit=limit).with_option(equal(4))
        made = make(request, CostModel(lambda placement: Costs.per_rank(4, placement.chunks)))
        costs = Costs.per_rank(4, made.schedule.placement.chunks)
        timeline = simulate(made.schedule, of_equal(costs, 4, made.schedule))
        assert max(timeline.peak_microbatches) <= 4 * limit + 1e-9
        assert made.lower_bound is not None and made.lower_bound <= timeline.makespan + 1e-9
        for name in NAMES:
            other = step(name, 4, 6, 4)
            if max(other.peak_microbatches) <= 4 * limit:
                assert timeline.makespan <= other.makespan + 1e-9, name


@given(DOCUMENTS, some.integers(40, 900), PLACEMENTS, some.floats(1, 3), some.booleans())
@settings(max_examples=60, deadline=None)
def test_no_plan_gets_stuck_or_breaks_its_limit(documents, most, placement, factor, splits) -> None:
    rates = LengthCosts.with_attention(Costs.per_rank(placement.ranks, placement.chunks), 1, equal_at=500)
    planner = Planner(placement, rates, splits_backward=splits)
    units = cut(documents, most)
    # As tight as can be: a rank keeps the longest document, or the fullest pack, and a little more.
    largest = max(sum(units.tokens[number] for number in chain) for chain in units.chains)
    limits = [largest * factor] * placement.ranks
    plan = planner.plan(planner.cut(documents, most), limits=limits, budget=0.001)
    check(plan.schedule)
    require_chain_order(plan.schedule, plan.units)
    timeline = simulate(plan.schedule, planner.costs(plan.units))
    assert timeline.makespan == pytest.approx(plan.seconds)
    assert max(timeline.peak_activations) <= limits[0] * (1 + 1e-6)
    assert plan.lower_bound <= plan.seconds


AMOUNTS = some.floats(0, 8)
RATES = some.builds(
    lambda activation, released, workspace, in_whole, scores, slices: StageRates(
        (1.0, 1.0, 1.0),
        (2e-3, 5e-3, 0.0),
        activation + slices[2],
        min(released, activation) + slices[2],
        workspace=workspace,
        workspace_in_whole=in_whole,
        scores=(scores, scores, scores, scores),
        slices=SequenceMemory(*slices),
    ),
    some.floats(0.1, 8),
    some.floats(-20, 8),
    AMOUNTS,
    AMOUNTS,
    some.sampled_from([0.0, 1e-2]),
    some.tuples(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, some.sampled_from([0.0, 1e-2])),
)
"""Stages of all kinds of memory: slices store anything, and I keeps less or more than F."""


@given(DOCUMENTS, some.integers(40, 900), PLACEMENTS, some.floats(1, 3), some.booleans(), some.data())
@settings(max_examples=60, deadline=None)
def test_bytes_of_all_kinds_keep_their_limit(documents, most, placement, factor, splits, data) -> None:
    """From the least limit on; the tightest is that of the largest chain alone."""
    stages = tuple(data.draw(RATES) for _ in range(placement.stages))
    planner = Planner(placement, LengthCosts(stages), splits_backward=splits)
    units = planner.cut(documents, most)
    limits = [factor * limit for limit in planner.least_limits(units)]
    plan = planner.plan(units, limits=limits, budget=0.001)
    check(plan.schedule)
    timeline = simulate(plan.schedule, planner.costs(plan.units))
    assert timeline.makespan == pytest.approx(plan.seconds)
    for peak, limit in zip(timeline.peak_activations, limits, strict=True):
        assert peak <= limit * (1 + 1e-6)
    assert abs(
        sum(change for rank in range(placement.ranks) for _, change in timeline.changes(rank))
    ) < 1e-6 * max(limits)
    assert plan.lower_bound <= plan.seconds


def test_a_document_that_no_rank_can_keep_is_refused() -> None:
    planner = Planner(v(4), LengthCosts.with_attention(Costs.per_rank(4, 2), 1))
    with pytest.raises(InfeasibleLimit, match="raise it to at least 1000"):
        planner.plan(planner.cut([[1000], [10]], 100), limits=[999.0] * 4)


def test_a_tight_limit_is_part_of_the_lower_bound() -> None:
    """Until its first I, on the way back, the last rank of a V has forwards of what it keeps and waits."""
    planner = Planner(v(8), LengthCosts.with_attention(Costs.per_rank(8, 2), 1))
    units = planner.cut([[32_768]] * 16, 8192)
    tight, free = (planner.plan(units, limits=[most * 32_768.0] * 8, budget=0) for most in (1, 16))
    assert free.lower_bound * 1.02 < tight.lower_bound <= tight.seconds


def test_plans_are_equal_on_all_ranks() -> None:
    planner = Planner(v(4), LengthCosts.with_attention(Costs.per_rank(4, 2), 1))
    documents = [[5000, 700], [12_000], [300, 4000, 800]] * 3
    one, other = (planner.plan(planner.cut(documents, 2000), limits=[20_000.0] * 4) for _ in range(2))
    assert one.schedule.digest == other.schedule.digest and one.units == other.units


def test_the_size_of_units_is_chosen_by_step_and_overhead() -> None:
    rates = LengthCosts.with_attention(Costs.per_rank(4, 2), 1)
    documents = [[16_384]] * 4
    limits = [32_768.0] * 4
    sizes = [Planner(v(4), rates, overhead=one).chosen_tokens(documents, limits) for one in (0, 500, 5000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.parametrize(("limit", "most"), [(0.5, 1.03), (0.3, 1.13), (0.25, 1.17)])
def test_ranks_seldom_wait_where_memory_is_tight(limit, most) -> None:
    """Steps over work for 16 equal sequences of 32K tokens, of which ranks keep 2 at the tightest limit."""
    planner = Planner(v(8), LengthCosts.with_attention(Costs.per_rank(8, 2), 1))
    documents = [[32_768]] * 16
    plan = planner.plan(planner.cut(documents, 8192), limits=[limit * 8 * 32_768] * 8)
    work = sum(planner.rates.work(Microbatches.of(documents))) / 8
    assert plan.lower_bound <= plan.seconds < most * work


def test_a_longer_search_finds_no_longer_step() -> None:
    planner = Planner(v(4), LengthCosts.with_attention(Costs.per_rank(4, 2), 1))
    documents = [[5000, 700], [12_000], [300, 4000, 800]] * 3
    limits = [14_000.0] * 4
    units = planner.cut(documents, 2000)
    found = [planner.plan(units, limits=limits, budget=seconds).seconds for seconds in (0, 0.01, 0.05)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


def test_longest_documents_leave_no_holes() -> None:
    """A long document among short ones, in slices at half of 1F1B's memory: within 4% of the bound."""
    random = np.random.default_rng(3)
    documents = [[int(length) for length in random.integers(200, 4000, 12)] for _ in range(8)]
    documents[3] = [60_000]
    planner = Planner(v(4), LengthCosts.with_attention(Costs.per_rank(4, 2), 1))
    largest = sorted((sum(lengths) for lengths in documents), reverse=True)
    plan = planner.plan(planner.cut(documents, 2048), limits=[0.5 * sum(largest[:4])] * 4)
    assert plan.seconds < 1.04 * plan.lower_bound


def test_a_file_that_takes_slices_in_another_order_is_refused() -> None:
    schedule = catalog.build("1f1b", 2, 4)
    with pytest.raises(ValueError, match="back in reverse"):
        require_chain_order(schedule, cut_at([[0, 1, 2]] * 2))
    with pytest.raises(ValueError, match="for 4 units, but there are 6"):
        require_chain_order(schedule, cut_at([[0, 1, 2]] * 3))


def test_slices_go_with_pairs_and_a_split_head_but_not_with_copies() -> None:
    costs = Costs.per_rank(4, 1)
    in_slices = named("1f1b", 4, 4).with_option(equal(4))
    split = make(replace(in_slices, splits_head=True), CostModel.fixed(costs)).schedule
    assert sum(action.kind is Kind.T for action in split) == 4 * 4 * 4
    pairs = make(request_in_pairs(named("dualpipe-v", 4, 8)).with_option(equal(3))).schedule
    assert pairs.paired and pairs.microbatches == 24
    with pytest.raises(ValueError, match="not copied to the host"):
        make(in_slices.with_option(OffloadRequest(0.5)), CostModel.fixed(costs))


RANKS = 4
MEASURED_DOCUMENTS = [
    [9000, 300, 40],
    [52000],
    [700] * 6,
    [20000, 5000],
    [6000, 6000],
    [800, 12000],
    [31000],
    [4000],
]


def planner(placement: Placement) -> Planner:
    """A planner whose stages keep 3 bytes of a token, of which I gives back 1."""
    rate = StageRates((1.0, 1.0, 1.0), (1e-4, 2.5e-4, 0.0), activation=3.0, released=1.0)
    return Planner(placement, LengthCosts((rate,) * placement.stages))


@pytest.mark.parametrize("shape", [v, linear])
def test_peaks_are_those_of_the_plan(shape: type[Placement]) -> None:
    placement = shape(RANKS)
    one, cases = planner(placement), []
    for most in (52_000, 90_000):
        plan = one.plan(one.cut(MEASURED_DOCUMENTS, 4096), limits=[3.0 * placement.chunks * most] * RANKS)
        cases.append((plan.schedule, one.costs(plan.units), 0.0))
    found = run_ranks(steps_of, RANKS, cases, 0)
    for number, (schedule, costs, _) in enumerate(cases):
        planned = simulate(schedule, costs).peak_memory
        assert [of_rank[number][1] for of_rank in found] == [round(peak) for peak in planned]


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("part", [0.25, 0.5])
def test_units_are_finer_where_a_limit_holds_few(ranks, part):
    """Packs as large as a microbatch wait for memory in any order, and so do few large slices."""
    placement = v(ranks)
    planner = Planner(placement, LengthCosts.with_attention(Costs.per_rank(ranks, 2), 1), overhead=OVERHEAD)
    for documents, most in (([[1024] * 8] * 2 * ranks, 1.13), ([[32_768]] * 2 * ranks, 1.11)):
        limits = [part * ranks * sum(documents[0])] * ranks
        units = planner.cut(documents, 8192)
        finer = planner.finer(units, limits)
        assert finer.documents == units.documents
        before, plan = (planner.plan(each, "rule", limits=limits).seconds for each in (units, finer))
        assert plan <= before
        assert plan / (sum(planner.rates.work(Microbatches.of(documents))) / ranks) < most
    assert planner.finer(units, [inf] * ranks) is units


def test_units_that_do_not_wait_stay(ranks=4):
    planner = Planner(v(ranks), LengthCosts.with_attention(Costs.per_rank(ranks, 2), 1))
    units = planner.cut([[131_072], [65_536], [8192] * 8] * 4, 8192)
    assert planner.finer(units, [65_536 * 4.0] * ranks) is units
