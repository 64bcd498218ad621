"""The searches' parts: each keeps what it is given valid, within the limits, and no longer."""

from random import Random

import pytest

from megatron_pp_ext.compiler.search.evaluate import run
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.propose import one_at_a_time
from megatron_pp_ext.compiler.search.rebuild import rebuild
from megatron_pp_ext.compiler.search.tune import tune
from megatron_pp_ext.compiler.search.window import Window, rests
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import simulate


def unequal(placement):
    """Every stage with other times and activations, some of them given back by I."""
    stages = [StageCosts(3 + s % 3, 2 + s % 4, 1 + s % 2, 4, s % 3) for s in range(placement.stages)]
    return Costs(tuple(stages), 1)


@pytest.mark.parametrize("placement", [linear(3), v(3), loop(2, 2), wave(2, 4)], ids=str)
def test_windows_keep_limits_and_shorten(placement):
    costs = unequal(placement)
    limits = [10 * placement.chunks] * placement.ranks
    problem = problem_of(placement, 5, costs, limits)
    before = one_at_a_time(problem)
    length, orders = rebuild(problem, before, 4000, Random(1), 0)
    schedule = problem.schedule(orders, "rebuilt")
    check(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == length / problem.scale
    assert length < run(problem, before).makespan
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, limits, strict=True))


def test_a_window_leaves_alone_what_is_outside():
    problem = problem_of(v(3), 6, unequal(v(3)), [16] * 3)
    before = one_at_a_time(problem)
    timed = run(problem, before)
    since, until = timed.makespan // 3, timed.makespan // 2
    after = Window(problem, before, timed, since, until).search(20, timed.makespan + 1, Random(1))
    assert after != before
    for old, new, starts in zip(before, after, timed.starts, strict=True):
        first = sum(start < since for start in starts)
        last = sum(start < until for start in starts)
        assert new[:first] == old[:first]
        assert new[last:] == old[last:]


def test_a_window_that_cannot_get_shorter_finds_nothing():
    """One microbatch on its own already takes as short as it can."""
    problem = problem_of(linear(3), 1, Costs.unit(linear(3)), [1] * 3)
    orders = one_at_a_time(problem)
    timed = run(problem, orders)
    window = Window(problem, orders, timed, 0, timed.makespan)
    assert window.search(100, timed.makespan, Random(1)) is None
    assert window.search(100, timed.makespan + 1, Random(1)) is not None


def test_rests_are_the_longest_ways_to_the_end():
    """By hand: two ranks, one microbatch, a hop of 1; the first rank's I and W come last."""
    placement = linear(2)
    problem = problem_of(placement, 1, Costs((StageCosts(1, 2, 3), StageCosts(4, 5, 6)), 1), [1, 1])
    orders = [[0, 3, 4], [1, 2, 5]]
    timed = run(problem, orders)
    assert timed.makespan == 17
    assert rests(problem, orders, timed) == [[17], [15], [11], [5], [3], [6]]


def test_each_leg_of_a_wave_may_pause_as_it_likes():
    """So few trials that all plans but the best are as they started."""

    def pairs(each_leg):
        problem = problem_of(wave(2, 4), 4, Costs.unit(wave(2, 4)), [8] * 2)
        found = [one for seed in range(10) for one in tune(problem, 11, Random(seed), each_leg=each_leg)[1:]]
        return {plan.pauses == plan.pauses[:2] * 4 for _, plan in found}

    assert pairs(each_leg=False) == {True}
    assert pairs(each_leg=True) == {True, False}
