"""The parts of the search: each keeps its orders valid and within the limits, and makes none longer."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext import log_lines
from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import least_limits
from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.compiler.search.annealing import anneal, walk
from megatron_pp_ext.compiler.search.list_scheduling import DueRules, Knobs, list_schedule
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.proposals import ProgressLog, Proposal, Proposer, one_at_a_time, search
from megatron_pp_ext.compiler.search.tables import generator, heap_of, pop, push, tables, time_orders
from megatron_pp_ext.compiler.search.timed_order import estimate, timed_order
from megatron_pp_ext.compiler.search.tune import tune
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import simulate


def unequal(placement):
    """Return costs in which every stage has other times and activations, some of them given back by I."""
    stages = [
        StageCosts(3 + s % 3, 2 + s % 4, 1 + s % 2, 4, s % 3 - s % 2, workspace=s % 4 // 3)
        for s in range(placement.stages)
    ]
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
        assert [row.tolist() for row in timed.starts] == [
            [event.start for event in events] for events in timeline.events
        ]
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


@pytest.mark.parametrize("takes_more", [False, True])
@PLACEMENTS
def test_annealing_shortens_a_poor_order_within_the_limits(placement, takes_more):
    """One microbatch at a time leaves much to gain; orders and makespan that come back belong together."""
    costs, limits = unequal(placement), [10 * placement.chunks] * placement.ranks
    if takes_more:
        stages = (replace(stage, released_by_input_gradient=-3, workspace=4) for stage in costs.stages)
        costs = replace(costs, stages=tuple(stages))
        limits = [least + 9 for least in least_limits(costs, placement)]
    problem = problem_of(placement, 5, costs, limits)
    poor = one_at_a_time(problem)
    shortest, orders = anneal(problem, poor, 4000, 3)
    schedule = problem.schedule(orders, "annealed")
    check(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == shortest / problem.scale < time_orders(problem, poor).makespan / problem.scale
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, limits, strict=True))
    assert anneal(problem, orders, 4000, 3, floor=shortest) == (shortest, orders)


def test_a_search_goes_on_behind_its_bound():
    """Who asks for results decides which of them is the last: what meets the bound may not fit."""
    placement = v(3)
    problem = problem_of(placement, 5, unequal(placement), [20] * 3)
    poor = one_at_a_time(problem)
    bound = 2 * time_orders(problem, poor).makespan
    found = [length for length, _, _ in search(problem, 1, bound, [(poor, "poor")])]
    assert max(found) <= bound
    assert len(found) > 2


def test_no_moves_are_spent_on_orders_without_a_chance(monkeypatch):
    """The orders within a twentieth of the shortest share all moves, however few these orders are."""
    placement = v(3)
    problem = problem_of(placement, 5, unequal(placement), [20] * 3)
    poor = one_at_a_time(problem)
    annealed = []

    def counted(problem, orders, moves, seed, floor):
        length = time_orders(problem, orders).makespan
        annealed.append((length, moves))
        return length, orders

    good = [(orders, name) for _, orders, name in search(problem, 8, 0, [])][-2:]
    monkeypatch.setattr(proposals, "anneal", counted)
    monkeypatch.setattr(proposals, "_listed", lambda problem, trials: iter(()))
    poor, *close = [length for length, _, _ in search(problem, 8, 0, [(poor, "poor"), *good])][:3]
    assert poor > 1.05 * min(close) > max(close)
    assert sorted(length for length, _ in annealed[:2]) == sorted(close)
    assert poor not in [length for length, _ in annealed]
    turns = sum(eighths / 8 for _, eighths in (*proposals._TURNS, *proposals._AGAIN))
    assert sum(moves for _, moves in annealed) == pytest.approx(8 * proposals._MOVES * turns, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_list_schedule_gets_stuck_where_an_input_gradient_takes_more(data):
    """A limit holds one microbatch and the I that takes most; due times are any."""
    draw = data.draw
    placement = draw(st.sampled_from([linear(3), v(3), loop(2, 2), wave(2, 4)]))
    stages = []
    for _ in range(placement.stages):
        kept = draw(st.integers(0, 5))
        released, workspace = draw(st.integers(-6, kept)), draw(st.integers(0, 4))
        stages.append(
            StageCosts(*draw(st.tuples(*[st.integers(1, 9)] * 3)), kept, released, workspace=workspace)
        )
    limits = [
        sum(stages[stage].activation for stage in own) + max(stages[stage].growth(Kind.I) for stage in own)
        + draw(st.integers(0, 6))
        for own in map(placement.stages_of, range(placement.ranks))
    ]  # fmt: skip
    costs = Costs(tuple(stages), draw(st.integers(0, 3)))
    problem = problem_of(placement, draw(st.integers(1, 6)), costs, limits)
    delay, patience = draw(st.sampled_from([0, 20, 1 << 50])), draw(st.tuples(*[st.integers(0, 4)] * 2))
    rules = DueRules(delay, 1 << 50, *patience, frees_memory=draw(st.booleans()))
    due = tuple(draw(st.integers(-20, 90)) for _ in range(problem.stations))
    gaps = tuple(draw(st.integers(0, 20)) for _ in range(problem.microbatches))
    done = list_schedule(problem, Knobs(due, gaps, rules))
    assert done is not None
    assert problem.fits(done[1])
    timeline = simulate(problem.schedule(done[1], "listed"), costs)
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, limits, strict=True))
    check(timeline.schedule)


@pytest.mark.parametrize("kept", [(1, 0), (0, 0)])
def test_a_rank_that_keeps_nothing_needs_no_limit(kept):
    costs = Costs(tuple(StageCosts(1, 1, 1, activation) for activation in kept))
    problem = problem_of(linear(2), 4, costs, [2, 1e-3])
    assert [length for length, _, _ in search(problem, 1, 0, [])]


@PLACEMENTS
def test_all_that_is_known_of_an_order_follows_its_moves(placement):
    """Starts, tails, places and memory are those of the order entered anew."""
    problem = problem_of(placement, 5, unequal(placement), [10 * placement.chunks] * placement.ranks)
    poor = one_at_a_time(problem)
    state, best = timed_order(problem, poor, time_orders(problem, poor).starts), np.array(poor)
    lengths, random = np.zeros(4, np.int64), generator(5)
    before = np.array(poor)
    for first in range(0, 1000, 20):
        walk(tables(problem), state, best, lengths, random, first, first + 20, 1000, 1024, 0)
        orders = (state.order // problem.microbatches).tolist()
        timed = time_orders(problem, orders)
        assert problem.fits(orders)
        assert lengths[0] == timed.makespan
        assert lengths[2] == time_orders(problem, best.tolist()).makespan
        fresh = timed_order(problem, orders, timed.starts)
        for name in ("order", "start", "tail", "place", "live", "trial"):
            assert (getattr(state, name) == getattr(fresh, name)).all(), name
        assert not state.heap.waits.any() and not state.listed.any()
    assert (state.order // problem.microbatches != before).any()


@PLACEMENTS
def test_a_move_is_estimated_by_the_longest_way_through_what_it_moves(placement):
    """Where everything stays in its place, these are ways that are there already."""
    problem = problem_of(placement, 3, unequal(placement), [10 * placement.chunks] * placement.ranks)
    orders = one_at_a_time(problem)
    state = timed_order(problem, orders, time_orders(problem, orders).starts)
    ways = state.start + state.tail
    longest = ways.argmax()
    for rank, row in enumerate(state.order):
        for first in range(len(row)):
            for last in range(first + 1, len(row) + 1):
                new = np.full(len(row), longest)
                new[first:last] = row[first:last]
                found = estimate(tables(problem), state, rank, new, first, last)
                assert found == max(ways[row[first:last]])
    assert (state.trial == state.start).all()


def test_tails_are_the_longest_ways():
    """By hand: two ranks, one microbatch, a hop of 1; the first rank's I and W come last."""
    placement = linear(2)
    problem = problem_of(placement, 1, Costs((StageCosts(1, 2, 3), StageCosts(4, 5, 6)), 1), [1, 1])
    orders = [[0, 3, 4], [1, 2, 5]]
    timed = time_orders(problem, orders)
    assert timed.makespan == 17
    assert timed_order(problem, orders, timed.starts).tail.tolist() == [17, 15, 11, 5, 3, 6]


def test_each_leg_of_a_wave_may_pause_as_it_likes():
    """There are so few trials that all plans but the best are still as they started."""

    def pairs(each_leg):
        problem = problem_of(wave(2, 4), 4, Costs.unit(wave(2, 4)), [8] * 2)
        found = [one for seed in range(10) for one in tune(problem, 11, Random(seed), each_leg=each_leg)[1:]]
        return {plan.pauses == plan.pauses[:2] * 4 for _, plan in found}

    assert pairs(each_leg=False) == {True}
    assert pairs(each_leg=True) == {True, False}


def test_a_shortened_problem_has_fewer_microbatches_and_all_else():
    problem = problem_of(v(3), 6, unequal(v(3)), [1000] * 3)
    short = problem.shortened(2)
    assert short.microbatches == 2
    assert short.shortened(6) == problem


@pytest.mark.parametrize("seed", range(5))
def test_actions_come_out_by_time_and_then_by_number(seed):
    random, count = Random(seed), 40
    heap, waiting, inside = heap_of(count), 0, {}
    for _ in range(400):
        if inside and random.random() < 0.45:
            action = pop(heap, waiting)
            waiting -= 1
            assert action == min(inside, key=lambda one: (inside[one], one))
            del inside[action]
        else:
            action, time = random.randrange(count), random.randrange(20)
            waiting = push(heap, waiting, time, action)
            inside.setdefault(action, time)
        assert waiting == len(inside)
        assert {*heap.waits.nonzero()[0].tolist()} == {*inside}


RANKS, MICROBATCHES, BOUND, LIMITS = 2, 4, 30, (1000.0, 1000.0)


def proposed(lengths, fitting, monkeypatch):
    """Search where the results have ``lengths``, and those at the places ``fitting`` keep the limits.

    Return the lengths of the proposals, the places that the search came to, and the lengths that were judged.
    """
    placement = v(RANKS)
    proposer = Proposer(Cut(placement, MICROBATCHES, Costs.unit(placement), LIMITS))
    proposer.bound = BOUND
    reached: list[int] = []
    judged: list[float] = []

    def search(problem, trials, floor, starts):
        for place, length in enumerate(lengths):
            reached.append(place)
            yield length * problem.scale, one_at_a_time(problem), f"result {place}"

    def keeps(one: Proposal) -> bool:
        judged.append(one.makespan)
        return int(one.origin.split()[1]) in fitting

    monkeypatch.setattr(proposals, "search", search)
    monkeypatch.setattr(Proposal, "is_kept", property(keeps))
    found = proposer.from_search(1)
    return [one.makespan for one in found], reached, judged


def test_a_search_ends_with_a_result_at_the_bound_that_fits(monkeypatch):
    assert proposed([40, 30, 30, 35], {0, 2, 3}, monkeypatch)[:2] == ([30], [0, 1, 2])


def test_a_search_goes_on_while_none_at_the_bound_fits(monkeypatch):
    found, reached, _ = proposed([30, 40, 35, 36], {1, 2, 3}, monkeypatch)
    assert found == [35]
    assert reached == [0, 1, 2, 3]


def test_results_are_judged_from_the_shortest_on(monkeypatch):
    """What is longer than one that fits is not, since counting messages takes long."""
    _, _, judged = proposed([50, 40, 35, 45], {0, 1, 3}, monkeypatch)
    assert judged == [35, 40]


def test_results_that_rounding_may_reverse_keep_their_order(monkeypatch):
    close = 35 * (1 + proposals.CLOSE / 2)
    assert proposed([close, 40, 35], {0, 1, 2}, monkeypatch)[0] == [close, 35]


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a search logs."""
    lines: list[str] = []
    with log_lines.shown(proposals.__name__, lines.append):
        yield lines


def test_a_search_says_what_it_compiles_and_what_that_took(monkeypatch, tmp_path, said):
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr(proposals, "_PAUSE_SECONDS", math.inf)
    for limits in (3.0, (3.0, 3.0, 4.0)):
        for _ in range(2):  # the second time it is in the cache
            compile_schedule(3, 5, Costs.unit(v(3)), limits, placements=[v(3)], trials=1)
    expected = [
        rf"{word} a schedule for p = 3, m = 5, v placement, {limit}{took}"
        for limit in ("limit 3", "limits from 3 to 4")
        for word, took in (("compiling", ""), ("compiled", r", in \d+\.\d s, \d+\.\d% above its lower bound"))
    ]
    assert len(said) == len(expected)
    assert all(map(re.fullmatch, expected, said)), said


def test_a_long_search_says_now_and_then_how_far_it_is(monkeypatch, said):
    clock = iter((100.0, 105.0, 111.0, 112.0, 121.0, 122.0, 122.5))
    monkeypatch.setattr(proposals.time, "monotonic", lambda: next(clock))
    what = "a schedule for p = 2, m = 4, v placement, limit 1e+10"
    log = ProgressLog(problem_of(v(2), 4, Costs.unit(v(2)), [1e10] * 2), [1e10] * 2, 20.0)
    for makespan in (25.0, 22.0, 21.0, 23.0, 19.9):
        log.record(makespan)
    log.end()
    assert said == [
        f"compiling {what}",
        f"compiling {what}: so far 10.0% above its lower bound after 11 s",
        f"compiling {what}: so far 5.0% above its lower bound after 21 s",
        f"compiled {what}, in 22.5 s, 0.0% above its lower bound",
    ]


def test_a_search_without_a_result_says_so(said: list[str]) -> None:
    ProgressLog(problem_of(v(2), 4, Costs.unit(v(2)), [4.0] * 2), [4.0] * 2, 20.0).end()
    assert said[-1].endswith("s, none found")


INPUTS = ((3, 5, v(3), (10, 11, 7, 1), 5.0), (2, 3, wave(2, 4), (1, 1.1, 0.7, 0.05), 6.0))


def digests() -> list[str]:
    """Return what a short search finds."""
    found = []
    for ranks, microbatches, placement, (f, i, w, hop), limit in INPUTS:
        costs = Costs.uniform(placement, forward=f, input_gradient=i, weight_gradient=w, hop=hop)
        compiled = compile_schedule(ranks, microbatches, costs, limit, placements=[placement], trials=1)
        assert compiled.lower_bound < compiled.timeline.makespan, "the whole search has to run"
        found.append(compiled.timeline.schedule.digest)
    return found


def test_compiled_and_interpreted_loops_find_the_same(tmp_path, monkeypatch):
    root = str(Path(__file__).parents[2])
    script = "from tests.compiler.test_search import digests; print(*digests())"
    environment = os.environ | {
        "MEGATRON_PP_EXT_CACHE": str(tmp_path / "interpreted"),
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONPATH": root,
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "compiled"))
    assert run.stdout.split() == digests()
