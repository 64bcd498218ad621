"""The lower bounds against proved optima, Little's law and sums by hand; one that is too low is seen, too.

The optima were proved with CP-SAT, as smaller ones are in ``test_compile_exact``.
"""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.bounds import _last_start, lower_bound
from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import Placement, linear, loop, v
from megatron_pp_ext.schedule.simulate import simulate

UNIT = (1, 1, 1, 0)


def uniform(placement: Placement, times) -> Costs:
    forward, i, w, hop = times
    return Costs.uniform(placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)


def bound(placement, microbatches, times, limit):
    return lower_bound(placement, microbatches, uniform(placement, times), [limit] * placement.ranks)


@pytest.mark.parametrize(
    ("p", "m", "limit", "optimum"),
    [
        (4, 8, 4, 59), (4, 8, 5, 56), (4, 8, 6, 53), (4, 8, 8, 51), (8, 16, 16, 103),
        (6, 6, 6, 53), (6, 6, 7, 50), (6, 6, 8, 47), (6, 6, 10, 43), (6, 6, 12, 41),
    ],
)  # fmt: skip
def test_the_bound_is_the_proved_optimum(p, m, limit, optimum):
    """Unit cost on a V; only below V-Min's memory is the optimum above it: 86 at p = 4, 58 at p = 6."""
    assert bound(v(p), m, UNIT, limit) == optimum
    assert bound(v(4), 8, UNIT, 3) == 80
    assert bound(v(6), 6, UNIT, 5) == 56


@pytest.mark.parametrize("times", [(5, 1, 1, 0), (9, 2, 1, 1), (30, 1, 6, 0)])
@pytest.mark.parametrize("p", [5, 6])
def test_little_s_law(times, p):
    """A V with room for M chunks: ((2p+1)(F+I) + 2W + (4p-4) hop) / M a microbatch.

    The first microbatch has to reach the last rank, and the last one has to come back from there.  While a
    rank fills up and runs empty it cannot use all of its memory, for (M-1)/2 of F, and of I or I and W.
    """
    forward, i, w, hop = times
    kept = (2 * p + 1) * (forward + i) + 2 * w + (4 * p - 4) * hop
    assert bound(v(p), 401, times, 4) - bound(v(p), 400, times, 4) == pytest.approx(kept / 4)
    head, tail = (p - 1) * (forward + hop), (p - 1) * (i + hop) + w
    until_weight = head + 100 * kept + (4 - 1) / 2 * (forward + i + w)
    until_gradient = head + 100 * kept + (4 - 1) / 2 * (forward + i) - min(tail, 4 * w) / 4 + tail
    assert bound(v(p), 400, times, 4) == pytest.approx(max(until_weight, until_gradient))
    assert bound(v(p), 400, times, 4.9) == bound(v(p), 400, times, 4)


@pytest.mark.parametrize("times", [UNIT, (10, 11, 7, 1)])
def test_turns_of_the_last_rank(times):
    """Both stages of a V's last rank keep what a microbatch on its way to the first rank and back has left.

    With room for 3 activations one microbatch at a time is on this way, and for 2 or 4 nothing else may be
    left of those that were before it.  With room for 2, the next one's first F has to wait, too.
    """
    p = 5
    forward, i, w, hop = times
    way = p * (forward + i) + 2 * (p - 1) * hop
    turns = {2: way + i + 2 * w + forward, 3: way + w, 4: (way + i + 2 * w) / 2}
    for limit, turn in turns.items():
        more = bound(v(p), 402, times, limit) - bound(v(p), 400, times, limit)
        assert more == pytest.approx(2 * turn)
    # The way to the turn, all turns but the last, the last way, and I of the stages before with the last W.
    there = p * forward + (p - 1) * hop
    back = p * i + (p - 1) * hop + w
    assert bound(v(p), 9, times, 3) == pytest.approx(there + 8 * turns[3] + way + back)


@pytest.mark.parametrize(
    ("microbatches", "more", "last"),
    [(1, 0, 0), (2, 0, 10), (3, 0, 107), (4, 0, 125), (3, 1, 97), (4, 1, 115)],
)
def test_turns_of_two_at_a_time(microbatches, more, last):
    """Turns of 97 that begin 10 apart; all is done after 115.

    The third begins when the first is all done, 115, or the second has had its turn, 10 + 97.  With one more
    that may have a W left, it begins when the first has had its turn, and the fourth when the first is done.
    """
    assert _last_start(microbatches, 2, more, 97, 115, 10) == last


def test_the_last_rank_has_its_weight_gradients_to_do():
    """Room for one microbatch on a V of 2 ranks; behind the I of rank 1's second stage come its I and two W.

    The first microbatch is there after 2, and its way back takes 4.  Then come I and W, which take 41, and
    the F of the next; this one's way takes 4 as well, and its I and W take 41.
    """
    assert bound(v(2), 2, (1, 1, 20, 0), 2) == 2 + 4 + 41 + 1 + 4 + 41


def test_what_w_still_holds_counts_until_its_end():
    """Two ranks, room for one: 2 are kept from F to the end of I, 1 of them until W has run."""
    costs = Costs((StageCosts(1, 5, 1, 2, 1),) * 2)
    few, more = (lower_bound(linear(2), m, costs, [3, 3]) for m in (100, 102))
    assert more - few == pytest.approx(2 * 12)
    few, more = (lower_bound(linear(2), m, costs, [2, 2]) for m in (100, 102))
    assert more - few == pytest.approx(2 * (12 + 1))
    wide = Costs((StageCosts(5, 1, 1, 2, 1),) * 12)
    few, more = (lower_bound(v(6), m, wide, [8] * 6) for m in (100, 101))
    assert more - few == pytest.approx((2 * 13 * 6 + 1 * 2 * 1) / 8)


@pytest.mark.parametrize(("placement", "hops"), [(linear(3), 4), (v(3), 8), (loop(3, 2), 10)])
def test_one_microbatch_takes_its_way_and_the_last_w(placement, hops):
    """Nothing but the way through all stages and back; a V turns round without a hop."""
    times = 3, 2, 5, 7
    assert bound(placement, 1, times, 9) == (3 + 2) * placement.stages + 5 + hops * 7


def test_the_last_w_need_not_be_the_first_stage_s():
    costs = Costs((StageCosts(1, 1, 1), StageCosts(1, 1, 1), StageCosts(1, 1, 20)), hop=1)
    assert lower_bound(linear(3), 1, costs, [9] * 3) == 3 + 2 + 1 + 20


def test_work_begins_when_the_first_microbatch_arrives():
    """The slow last rank: the way to it, then all of its work."""
    costs = Costs((StageCosts(1, 1, 1), StageCosts(1, 1, 1), StageCosts(4, 5, 6)), hop=2)
    # Behind its last I the others still have 2 hops, 2 I and a W to go; its own W, 6 long, may fill that.
    assert lower_bound(linear(3), 10, costs, [99] * 3) == 2 + 4 + 10 * 15


def test_memory_that_lets_nothing_overlap():
    """A limit of one microbatch for two ranks: each waits for the other's F and I, every time."""
    assert bound(linear(2), 10, UNIT, 1) == 10 * 5
    assert bound(linear(2), 10, (1, 1, 1, 3), 1) >= 10 * (5 + 2 * 3)


def test_limits_of_single_ranks_count():
    costs = Costs.unit(v(4))
    wide = lower_bound(v(4), 100, costs, [8] * 4)
    for rank in range(4):
        limits = [8.0] * 4
        limits[rank] = 2
        assert lower_bound(v(4), 100, costs, limits) > 1.5 * wide


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
@pytest.mark.parametrize("kept", [0, 1])
def test_most_may_be_kept_between_an_input_gradient_and_its_w(name, kept):
    schedule = catalog.build(name, 3, 12)
    costs = Costs((StageCosts(1, 1, 3, kept, -5, workspace=2),) * schedule.placement.stages)
    timeline = simulate(schedule, costs)
    work = 12 * 5 * schedule.placement.chunks
    bound = lower_bound(schedule.placement, 12, costs, timeline.peak_activations)
    assert work <= bound <= timeline.makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "1f1b-v"])
def test_a_whole_backward_need_not_keep_what_an_input_gradient_would(name):
    """A long W, for which an I would keep eight times what the forward does: the bound is of either order."""
    schedule = catalog.build(name, 2, 7)
    costs = Costs((StageCosts(5, 2, 15, 1, -7),) * schedule.placement.stages, hop=1)
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, 7, costs, timeline.peak_activations)
    assert 7 * 22 * schedule.placement.chunks <= bound <= timeline.makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "1f1b-v"])
@pytest.mark.parametrize("memory", [1.0, 0.5])
def test_what_a_weight_gradient_hides_is_in_no_bound(name, memory):
    """Whole backwards hide it all; on the busiest rank nothing else is shorter than the work."""
    schedule = catalog.build(name, 3, 30)
    one = StageCosts(1, 5, 6, 2, 2 * memory, hidden=4)
    costs = Costs((one, replace(one, forward=3, weight_gradient=9)) * (schedule.placement.stages // 2 + 1))
    costs = replace(costs, stages=costs.stages[: schedule.placement.stages])
    timeline = simulate(schedule, costs)
    longer = Costs(tuple(replace(stage, hidden=0) for stage in costs.stages))
    bound, above = (
        lower_bound(schedule.placement, 30, each, timeline.peak_activations) for each in (costs, longer)
    )
    work = max(sum(costs.seconds(action) for action in order) for order in schedule.orders)
    assert work <= bound <= timeline.makespan < above


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "v-half", "v-zb"])
def test_a_shared_vocabulary_adds_to_the_path_and_to_the_work(name):
    schedule = share(lambda count: catalog.build(name, 3, count), 7)
    stages = (StageCosts(1, 1, 1),) * schedule.placement.stages
    costs = Costs(stages, 0.25, head=HeadCosts(2, 1, hidden=3, sums=5))
    timeline = simulate(schedule, costs)
    bound = lower_bound(schedule.placement, 7, costs, timeline.peak_activations)
    work = max(sum(costs.seconds(action) for action in order) for order in schedule.orders)
    assert work <= bound <= timeline.makespan
    alone = lower_bound(replace(schedule.placement, splits_head=False), 7, costs, (100.0,) * 3)
    one = lower_bound(schedule.placement, 1, costs, (100.0,) * 3)
    one_alone = lower_bound(replace(schedule.placement, splits_head=False), 1, costs, (100.0,) * 3)
    assert bound > alone
    assert one == pytest.approx(one_alone + 2 + 3 + 5)
