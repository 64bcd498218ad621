"""Does the compiler reach the makespans that others have reached?"""

import time

from benchmarks.report import Row, table
from benchmarks.schedules.comparison import costs_of, verdict
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.request import TRIALS
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v
from reference.best_known import V_SHAPED, WAVE_OF_FOUR
from reference.published_schedules import MEASURED_COST

ZB_2P = (0.0433, 0.0039, 0.0026, 0.0066, 0.0054, 0.0028)
"""The bubbles of the zero bubble paper's automatic schedule with twice 1F1B's memory (table 5)."""


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
        seconds, makespan = time.process_time() - start, compiled.timeline.makespan
        outcome = makespan, compiled.lower_bound, verdict(makespan, goal), compiled.origin
        rows.append((*label, limit, goal, *outcome, trials, f"{seconds:.1f}"))
        if makespan <= goal * (1 + 1e-9):
            break
    return rows


def memory_limited() -> str:
    """Measured pipelines, compiled for 1F1B's memory and for twice as much; ZB-2p is made for a short span.

    The column "at least" is a bound for linear placement: rank 0 begins before the last rank does the first
    of its F and I, and ends after the gradient of the last has come back.
    """
    rows: list[Row] = []
    for (p, m, forward, i, w, hop, _), rate in zip(MEASURED_COST, ZB_2P, strict=True):
        halves = Costs((StageCosts(forward / 2, i / 2, w / 2, 0.5),) * (2 * p), hop)
        around = (p - 1) * (forward + i + 2 * hop) + m * (forward + i) + i + w
        least = max(0.0, 1 - m * (forward + i + w) / around)
        for limit in (p, 2 * p):
            for place in (linear(p), v(p)):
                timeline = compile_schedule(p, m, halves, limit, placements=[place], trials=100).timeline
                paper = f"{rate:.4f}" if limit == 2 * p else ""
                bound = f"{least:.4f}" if place.chunks == 1 else ""
                bubbles = f"{timeline.bubble_span:.4f}", f"{timeline.bubble:.4f}"
                rows.append((p, m, limit, place.shape, paper, bound, *bubbles))
    head = (
        "p", "m", "limit (stages)", "placement", "ZB-2p, span", "at least", "bubble in span",
        "bubble in makespan",
    )  # fmt: skip
    return table(head, rows)
