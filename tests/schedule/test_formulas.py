"""Makespan and peak activations in closed form, with F = I = W = 1, p ranks and m microbatches."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate

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
