"""The parts of the search: each keeps its orders valid and within the limits, and makes none longer."""

from random import Random

import pytest

from megatron_pp_ext.compiler.search.beam_search import Window
from megatron_pp_ext.compiler.search.integer_timing import retime_orders, time_orders, times_to_end
from megatron_pp_ext.compiler.search.polish import polish
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.proposals import one_at_a_time
from megatron_pp_ext.compiler.search.rebuild import rebuild
from megatron_pp_ext.compiler.search.tune import tune
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import simulate


def unequal(placement):
    """Return costs in which every stage has other times and activations, some of them given back by I."""
    stages = [StageCosts(3 + s % 3, 2 + s % 4, 1 + s % 2, 4, s % 3) for s in range(placement.stages)]
    return Costs(tuple(stages), 1)


PLACEMENTS = pytest.mark.parametrize("placement", [linear(3), v(3), loop(2, 2), wave(2, 4)], ids=str)


def random_orders(problem, random, *, whole):
    """Draw every action from those that are possible, with ``whole`` or split backwards."""
    stages, stations = problem.placement.stages, problem.stations
    reached, pending = [problem.microbatches] + [0] * stations, []
    orders = [[] for _ in range(problem.placement.ranks)]
    while possible := [x for x in range(stations) if reached[x]] + pending:
        code = random.choice(possible)
        if code < stations:
            reached[code] -= 1
            reached[code + 1] += 1
            if code >= stages:
                weight = problem.weight_of(code)
                pending += [] if whole else [weight]
                code = weight + stages if whole else code
        else:
            pending.remove(code)
        orders[problem.home[code]].append(code)
    return orders


@pytest.mark.parametrize("whole", [True, False])
@PLACEMENTS
def test_integer_times_are_those_of_the_simulation(placement, whole):
    """Costs are unequal and have a hop; shuffled orders may be ones in which ranks wait for each other."""
    random, costs = Random(7), unequal(placement)
    problem = problem_of(placement, 5, costs, [1000] * placement.ranks)
    assert problem.scale == 1
    stuck = 0
    for _ in range(30):
        orders = random_orders(problem, random, whole=whole)
        timed, timeline = time_orders(problem, orders), simulate(problem.schedule(orders, "random"), costs)
        assert timed.starts == [[event.start for event in events] for events in timeline.events]
        assert timed.makespan == timeline.makespan
        if whole:
            for order in orders:
                random.shuffle(order)
            timed, schedule = time_orders(problem, orders), problem.schedule(orders, "shuffled")
            stuck += timed is None
            if timed is None:
                with pytest.raises(InvalidSchedule):
                    simulate(schedule, costs)
            else:
                assert timed.makespan == simulate(schedule, costs).makespan
    assert stuck or not whole


@PLACEMENTS
def test_orders_that_change_late_are_timed_again_from_there(placement):
    random = Random(8)
    problem = problem_of(placement, 5, unequal(placement), [1000] * placement.ranks)
    for _ in range(60):
        orders = random_orders(problem, random, whole=False)
        before = time_orders(problem, orders)
        rank = random.randrange(len(orders))
        at = random.randrange(1, len(orders[rank]) - 1)
        orders[rank][at : at + 2] = reversed(orders[rank][at : at + 2])
        since = before.starts[rank][at - 1] + problem.duration[orders[rank][at - 1]]
        assert retime_orders(problem, orders, before, since) == time_orders(problem, orders)


@PLACEMENTS
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
    assert length < time_orders(problem, before).makespan
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, limits, strict=True))


def test_a_window_leaves_alone_what_is_outside():
    problem = problem_of(v(3), 6, unequal(v(3)), [16] * 3)
    before = one_at_a_time(problem)
    timed = time_orders(problem, before)
    since, until = timed.makespan // 3, timed.makespan // 2
    after = Window(problem, before, timed, since, until).search(20, timed.makespan + 1, Random(1))
    assert after != before
    for old, new, starts in zip(before, after, timed.starts, strict=True):
        first = sum(start < since for start in starts)
        last = sum(start < until for start in starts)
        assert new[:first] == old[:first]
        assert new[last:] == old[last:]


def test_a_window_that_cannot_get_shorter_finds_nothing():
    """One microbatch alone already takes the shortest time possible."""
    problem = problem_of(linear(3), 1, Costs.unit(linear(3)), [1] * 3)
    orders = one_at_a_time(problem)
    timed = time_orders(problem, orders)
    window = Window(problem, orders, timed, 0, timed.makespan)
    assert window.search(100, timed.makespan, Random(1)) is None
    assert window.search(100, timed.makespan + 1, Random(1)) is not None


def test_times_to_end_are_the_longest_ways():
    """By hand: two ranks, one microbatch, a hop of 1; the first rank's I and W come last."""
    placement = linear(2)
    problem = problem_of(placement, 1, Costs((StageCosts(1, 2, 3), StageCosts(4, 5, 6)), 1), [1, 1])
    orders = [[0, 3, 4], [1, 2, 5]]
    timed = time_orders(problem, orders)
    assert timed.makespan == 17
    assert times_to_end(problem, orders, timed) == [[17], [15], [11], [5], [3], [6]]


def test_each_leg_of_a_wave_may_pause_as_it_likes():
    """There are so few trials that all plans but the best are still as they started."""

    def pairs(each_leg):
        problem = problem_of(wave(2, 4), 4, Costs.unit(wave(2, 4)), [8] * 2)
        found = [one for seed in range(10) for one in tune(problem, 11, Random(seed), each_leg=each_leg)[1:]]
        return {plan.pauses == plan.pauses[:2] * 4 for _, plan in found}

    assert pairs(each_leg=False) == {True}
    assert pairs(each_leg=True) == {True, False}


@PLACEMENTS
def test_polish_shortens_a_poor_order(placement):
    """One microbatch at a time leaves much to gain; orders and makespan that come back belong together."""
    problem = problem_of(placement, 4, unequal(placement), [1000] * placement.ranks)
    poor = one_at_a_time(problem)
    shortest, orders = polish(problem, poor, 3000, Random(3), worse=8)
    assert shortest < time_orders(problem, poor).makespan
    assert time_orders(problem, orders).makespan == shortest
    check(problem.schedule(orders, "polished"))
    assert polish(problem, orders, 3000, Random(3), worse=8, floor=shortest) == (shortest, list(orders))


def test_a_shortened_problem_has_fewer_microbatches_and_all_else():
    problem = problem_of(v(3), 6, unequal(v(3)), [1000] * 3)
    short = problem.shortened(2)
    assert short.microbatches == 2
    assert short.shortened(6) == problem
