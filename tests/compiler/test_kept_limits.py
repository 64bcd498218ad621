"""Limits are kept to the last digit that rounding leaves, and times to the digits that integers leave."""

from fractions import Fraction

import pytest

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import InfeasibleLimit, at_most, least_limits, requested_budget
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.proposals import one_at_a_time
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v, wave


@pytest.mark.parametrize("activation", [1.0, 0.1, 1 / 3, 3e8])
@pytest.mark.parametrize("short", [1e-3, 1e-7])
def test_a_limit_a_little_below_four_chunks_holds_three(activation, short, tmp_path, monkeypatch):
    """V-Min's four chunks fit exactly into four; a byte less keeps them out, however many bytes they are."""
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    costs = Costs((StageCosts(1, 1, 1, activation),) * 8)
    full, less = (
        max(compile_schedule(4, 8, costs, 4 * activation * part, trials=0).timeline.peak_activations)
        for part in (1, 1 - short)
    )
    assert full == pytest.approx(4 * activation)
    assert less in (pytest.approx(2 * activation), pytest.approx(3 * activation))
    with pytest.raises(InfeasibleLimit, match="raise the limit to at least"):
        compile_schedule(4, 8, costs, 2 * activation * (1 - short), trials=0)


@pytest.mark.parametrize("size", [1e-9, 1.0, 8e10])
def test_only_rounding_may_pass_a_limit(size):
    assert at_most(size, size)
    assert at_most(size * (1 + 1e-15), size)
    for more in (1e-3, 1e-6, 1e-8):
        assert not at_most(size * (1 + more), size)


def test_what_a_fraction_is_a_fraction_of():
    """A share of what 1F1B keeps on the rank that keeps most; above 8 it is an amount with messages."""
    costs = Costs(tuple(StageCosts(1, 1, 1, kept) for kept in (3, 5, 7, 9)), message=0.5)
    for limit, microbatches, amount in ((1, 8, 2 * 8), (0.5, 8, 8), (8, 8, 128), (1, 1, 16), (0.25, 2, 4)):
        budget = requested_budget(limit, 2, microbatches, costs)
        assert (budget.ranks, budget.counted(costs).message) == ((amount, amount), 0)
    budget = requested_budget(8.001, 2, 8, costs)
    assert (budget.ranks, budget.counted(costs)) == ((8.001, 8.001), costs)


def test_a_first_rank_without_layers_does_not_set_the_limit():
    """As under a layout whose first stage is the embedding alone."""
    costs = Costs(tuple(StageCosts(1, 1, 1, kept) for kept in (0, 2, 4)))
    assert requested_budget(0.5, 3, 8, costs).ranks[0] == 0.5 * max(3 * 0, 2 * 2, 1 * 4)


@pytest.mark.parametrize("placement", [linear(4), loop(2, 2), v(2)])
def test_the_least_limit_holds_all_stages_of_a_rank(placement):
    costs = Costs(tuple(StageCosts(1, 1, 1, kept) for kept in (3, 5, 7, 11)))
    held = {"linear": (3, 5, 7, 11), "loop": (10, 16), "v": (14, 12)}
    assert least_limits(costs, placement) == held[placement.shape]


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [((0, 0), (0, 0), 12), ((-9, 6), (-1, 1), 13), ((-9, 8), (0, 1), 15), ((5, 2), (3, 1), 13)],
)
def test_the_least_limit_holds_what_a_backward_takes(first, second, least):
    """A rank with stages that keep 7 and 5; a backward of the second runs while the first waits for its own.

    An I may keep more, but a whole backward keeps nothing.
    """
    stages = [
        StageCosts(1, 1, 1, kept, released, workspace=9, workspace_in_whole=workspace)
        for kept, (released, workspace) in ((7, first), (5, second))
    ]
    costs = Costs((stages[0], StageCosts(1, 1, 1, 0), StageCosts(1, 1, 1, 0), stages[1]))
    assert least_limits(costs, v(2)) == (least, 0)
    problem = problem_of(v(2), 3, costs, [least, 0])
    assert problem.fits(one_at_a_time(problem))
    assert not problem_of(v(2), 3, costs, [least - 1, 0]).fits(one_at_a_time(problem))
    plenty = problem_of(v(2), 3, costs, [99, 0])
    assert (
        one_at_a_time(plenty) == plenty.split(one_at_a_time(plenty)) == problem.split(one_at_a_time(problem))
    )


def test_a_fraction_of_1f1b_counts_what_its_input_gradient_takes():
    costs = Costs((StageCosts(1, 1, 1, 3, -5, workspace=2), StageCosts(1, 1, 1, 4, 1)))
    assert requested_budget(0.5, 2, 8, costs).ranks == (6.5, 6.5)


@pytest.mark.parametrize(
    ("times", "scale"),
    [
        ((1, 2, 3, 0), 1),
        ((1, 2, 3, 0.5), 2),
        ((0.25, 1, 1, 0), 4),
        ((0.1, 0.7, 1, 0), 10),
        ((1, 1, 1, 1e-4), 10_000),
    ],
)
def test_short_decimals_are_kept_exactly(times, scale):
    forward, i, w, hop = times
    costs = Costs.uniform(linear(2), forward=forward, input_gradient=i, weight_gradient=w, hop=hop)
    problem = problem_of(linear(2), 1, costs, [9, 9])
    assert problem.scale == scale
    assert problem.delay == (hop * scale, 0, hop * scale, 0)
    both = (i + w) * scale
    expected = [forward * scale] * 2 + [i * scale] * 2 + [w * scale] * 2 + [both] * 2
    assert list(problem.duration) == pytest.approx(expected)


def test_other_times_are_rounded_to_a_ten_millionth_of_the_longest():
    costs = Costs((StageCosts(1 / 3, 2 / 7, 3 / 11), StageCosts(5 / 13, 7 / 17, 9 / 19)), hop=1 / 97)
    problem = problem_of(linear(2), 1, costs, [9, 9])
    times = [1 / 3, 5 / 13, 7 / 17, 2 / 7, 3 / 11, 9 / 19]
    assert max(problem.duration[:6]) == 10_000_000
    for found, seconds in zip(problem.duration, times, strict=False):
        assert abs(Fraction(found) / Fraction(problem.scale) - Fraction(seconds)) < Fraction(1, 10_000_000)


def test_what_an_action_takes_and_gives_back():
    """Codes are F by stage, I from the last stage back, W and whole backwards by stage."""
    costs = Costs((StageCosts(1, 2, 3, 7, 2), StageCosts(4, 5, 6, 9, 4)), hop=1)
    problem = problem_of(linear(2), 3, costs, [20, 20])
    assert problem.kept == (7, 9, -4, -2, -5, -5, -7, -9)
    assert problem.home == (0, 1, 1, 0, 0, 1, 0, 1)
    assert problem.work == [3 * 6, 3 * 15]
    assert (problem.stations, problem.size) == (4, 18)
    assert [problem.weight_of(station) for station in (2, 3)] == [5, 4]
    assert problem.fits([[0, 0, 3, 3, 4, 4], []])
    assert not problem.fits([[0, 0, 0], []])
    assert problem.fits([[0, 0, 6, 0], [1, 1, 7]])


@pytest.mark.parametrize("placement", [linear(3), v(3), loop(3, 2), wave(2, 4)])
def test_codes_and_schedules_say_the_same(placement):
    problem = problem_of(placement, 4, Costs.unit(placement), [99] * placement.ranks)
    orders = one_at_a_time(problem)
    assert problem.orders(problem.schedule(orders, "flex")) == orders
    assert problem.stations_by_rank == tuple(
        tuple(station for station in range(problem.stations) if problem.home[station] == rank)
        for rank in range(placement.ranks)
    )
