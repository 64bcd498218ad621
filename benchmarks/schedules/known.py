"""Does the compiler reach the makespans that others have reached?"""

import time

from benchmarks.report import Row, table
from benchmarks.schedules.comparison import UNIT, costs_of, verdict
from megatron_pp_ext.compiler.compile import TRIALS, compile_schedule
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v
from reference.best_known import V_SHAPED, WAVE_OF_FOUR
from reference.published_schedules import MORE_UNIT_COST, UNIT_COST

FAMILIES = ("1f1b", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb")


def best_known() -> str:
    """The best known makespans, proved optimal or not."""
    rows: list[Row] = []
    for p, m, times, goals in V_SHAPED:
        for limit, goal in goals.items():
            rows += _searches(("v", p, m, times), p, m, costs_of(v(p), times), limit, goal)
    for p, m, goals in WAVE_OF_FOUR:
        quarters = Costs((StageCosts(0.25, 0.25, 0.25, 0.25),) * (4 * p))
        for limit, goal in goals.items():
            rows += _searches(("4 chunks", p, m, "unit, whole stages"), p, m, quarters, limit, goal)
    head = (
        "cut", "p", "m", "F, I, W, hop", "limit", "best known", "compiled", "lower bound", "", "origin",
        "trials", "s",
    )  # fmt: skip
    return table(head, rows)


def _searches(label: Row, p: int, m: int, costs: Costs, limit: float, goal: float) -> list[Row]:
    """Return a row for the ordinary search, and one for a longer search if that misses the goal."""
    rows: list[Row] = []
    for trials in (TRIALS, 4 * TRIALS):
        start = time.process_time()
        compiled = compile_schedule(p, m, costs, limit, trials=trials)
        seconds, found = time.process_time() - start, compiled.timeline.makespan
        outcome = found, compiled.lower_bound, verdict(found, goal), compiled.origin
        rows.append((*label, limit, goal, *outcome, trials, f"{seconds:.1f}"))
        if found <= goal * (1 + 1e-9):
            break
    return rows


def published() -> str:
    """Unit cost: each published schedule against the compiled one at the same peak."""
    rows: list[Row] = []
    cases = [(name, case) for name, cases in (UNIT_COST | MORE_UNIT_COST).items() for case in cases]
    for name, (p, m, makespan, _, peak) in cases:
        cut = linear(p) if name in catalog.ENTRIES and catalog.ENTRIES[name].chunks == 1 else v(p)
        compiled = compile_schedule(p, m, costs_of(cut, UNIT), peak)
        found = compiled.timeline.makespan
        rows.append((name, p, m, peak, makespan, found, compiled.lower_bound, verdict(found, makespan)))
    return table(("schedule", "p", "m", "peak", "published", "compiled", "lower bound", ""), rows)


def closed_forms() -> str:
    """Unit cost, p = 2..16, m = p .. 8p: at each family's peak, its closed form or better."""
    rows: list[Row] = []
    for name in FAMILIES:
        entry = catalog.ENTRIES[name]
        assert entry.promise is not None
        found = []
        for p in range(2, 17):
            for m in (p, 2 * p, 4 * p, 8 * p):
                placement = entry.placement(p)
                costs, peak = costs_of(placement, UNIT), entry.promise.peak(p, m)
                compiled = compile_schedule(p, m, costs, peak, placements=[placement], trials=0)
                found.append(compiled.timeline.makespan - entry.promise.makespan(p, m))
        rows.append((name, found.count(0), sum(d < 0 for d in found), sum(d > 0 for d in found)))
    return table(("family", "equal", "shorter", "longer"), rows)
