"""The formulas in docs/schedules.md, and the numbers in the README, are those of the schedules."""

import math
import re
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
