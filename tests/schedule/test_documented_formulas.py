"""The formulas in docs/schedules.md, and the numbers in the README, are those of the schedules."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "schedules.md"

CONDITIONS = {
    "p is even": lambda p: p % 2 == 0,
    "p is odd": lambda p: p % 2 == 1,
    "p = 3k": lambda p: p % 3 == 0,
    "p = 3k+1": lambda p: p % 3 == 1,
    "p = 3k+2": lambda p: p % 3 == 2,
}


def formula(cell: str, p: int, m: int) -> float:
    """The value of a cell such as ``3m+(3p-7)/2 if p is even, 3m+(3p-4)/2 if p is odd``."""
    cell = re.sub(r" \(span.*?\)| for 2 chunks|, p dividing m| on the first rank", "", cell)
    for case in cell.split(", "):
        written, _, condition = case.partition(" if ")
        if not condition or CONDITIONS[condition](p):
            product = re.sub(r"(?<=[\d)])(?=[pm(])", "*", written)
            return float(eval(product, {"p": p, "m": m, "floor": math.floor}))
    raise AssertionError(f"{cell!r} says nothing about p = {p}")


def test_the_formulas_are_those_of_the_schedules() -> None:
    table = DOCUMENT.read_text().partition("| schedule | placement | makespan |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| .* \| (.*) \| (.*) \|$", table, re.MULTILINE)
    assert {name for name, *_ in rows} == {*catalog.NAMES}
    for name, makespan, peak in rows:
        for p, m in ((4, 8), (5, 15), (7, 14), (8, 16), (9, 27)):
            costs = Costs.per_rank(p, catalog.entry(name).chunks)
            timeline = simulate(catalog.build(name, p, m), costs)
            assert timeline.makespan == pytest.approx(formula(makespan, p, m)), (name, p, m)
            assert max(timeline.peak_microbatches) == formula(peak, p, m), (name, p, m)


def test_the_numbers_in_the_readme_are_those_of_the_schedules() -> None:
    p, m = 8, 32
    text = (ROOT / "README.md").read_text()
    assert f"The table is for {p} ranks and {m} microbatches" in text
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) == 5
    for name, makespan, peak in rows:
        timeline = simulate(catalog.build(name, p, m), Costs.per_rank(p, catalog.entry(name).chunks))
        assert timeline.makespan == pytest.approx(float(makespan)), name
        assert max(timeline.peak_microbatches) == float(peak), name


def test_makespans_of_pairs():
    """The table of docs/pairs.md, and what it says of V-ZB, which has none."""
    text = (ROOT / "docs" / "pairs.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for name, microbatches, cells in rows:
        schedule = catalog.build(name, 8, int(microbatches), paired=True)
        costs = of_a_rank(schedule.placement.chunks)
        shown = [simulate(schedule, replace(costs, pair=pair)).makespan for pair in (1.0, 0.9, 0.8, 0.7)]
        peak = max(simulate(schedule, costs).peak_microbatches)
        assert [f"{number:.1f}" for number in shown] + [f"{peak:g}"] == cells.split(" | ")
    without = [simulate(catalog.build("v-zb", 8, m), of_a_rank(2)).makespan for m in (16, 32)]
    (stated,) = re.findall(r"takes (\S+) for 16 microbatches and (\S+) for 32", text)
    assert tuple(f"{number:.1f}" for number in without) == stated


def of_a_rank(chunks):
    return Costs.per_rank(8, chunks, forward=2, input_gradient=2.2, weight_gradient=1.4, hop=0.05)
