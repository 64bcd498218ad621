"""Goals that others have reached: what does the compiler reach?"""

from tables import UNEQUAL, UNIT, Row, Times, costs_of, table, timed, verdict

from megatron_pp_ext.compiler.compile import TRIALS, compile_schedule
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v
from reference.published_schedules import MORE_UNIT_COST, UNIT_COST

# Best known makespans in half-stage slots (V placement): p, m, times, {live chunks: makespan}.  Those
# at unit cost are proved optimal except 119; the unequal ones are the best that a long search found,
# except 638, which is proved.
BEST_KNOWN: list[tuple[int, int, Times, dict[int, float]]] = [
    (4, 8, UNIT, {3: 86, 4: 59, 5: 56, 6: 53, 8: 51}),
    (6, 6, UNIT, {5: 58, 6: 53, 7: 50, 8: 47, 10: 43, 12: 41}),
    (8, 16, UNIT, {8: 119, 16: 103}),
    (4, 8, UNEQUAL, {4: 638}),
    (8, 16, UNEQUAL, {8: 1255}),
    (8, 32, UNEQUAL, {8: 2298}),
    (8, 16, (10, 10, 5, 0), {8: 1095}),
    (8, 32, (10, 10, 5, 0), {8: 2000}),
]

# The same for a wave of four chunks at unit cost, in whole-stage units: p, m, {activations: makespan}.
BEST_KNOWN_WAVE = [(4, 8, {2: 27.75, 3: 25.75, 4: 24.75}), (8, 8, {4: 31.75, 5: 28.75})]


LONG = 4 * TRIALS


def best_known() -> str:
    """The best known makespans, proved optimal or not."""
    rows: list[Row] = []
    for p, m, times, goals in BEST_KNOWN:
        for limit, goal in goals.items():
            rows += _searches(("v", p, m, times), p, m, costs_of(v(p), times), limit, goal)
    for p, m, goals in BEST_KNOWN_WAVE:
        quarters = Costs((StageCosts(0.25, 0.25, 0.25, 0.25),) * (4 * p))
        for limit, goal in goals.items():
            rows += _searches(("4 chunks", p, m, "unit, whole stages"), p, m, quarters, limit, goal)
    head = (
        "cut",
        "p",
        "m",
        "F, I, W, hop",
        "limit",
        "best known",
        "compiled",
        "lower bound",
        "",
        "origin",
        "trials",
        "s",
    )
    return table(head, rows)


def _searches(label: Row, p: int, m: int, costs: Costs, limit: float, goal: float) -> list[Row]:
    """A row for the ordinary search, and one for a longer one where that misses the goal."""
    rows: list[Row] = []
    for trials in (TRIALS, LONG):
        compiled, seconds = timed(p, m, costs, limit, trials)
        found = compiled.timeline.makespan
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
    forms = {
        "1f1b": (linear, lambda p: p, lambda p, m: 3 * (m + p - 1)),
        "zb-h1": (linear, lambda p: p, lambda p, m: 3 * m + p - 1),
        "zb-h2": (linear, lambda p: 2 * p - 1, lambda p, m: 3 * m + p - 1),
        "v-min": (v, lambda p: 2 * ((p + 4) // 3), lambda p, m: 6 * m + 4 * p - (5 if p % 3 else 7)),
        "v-half": (v, lambda p: 2 * ((p + 2) // 2), lambda p, m: 6 * m + 3 * p - (4 if p % 2 else 7)),
        "v-zb": (v, lambda p: 2 * p, lambda p, m: 6 * m + p - 1),
    }
    rows = []
    for name, (place, peak, makespan) in forms.items():
        met = shorter = missed = 0
        for p in range(2, 17):
            for m in (p, 2 * p, 4 * p, 8 * p):
                placement = place(p)
                # p = 2 has no V-Half of its own: the closed form would be below a rank's work.
                goal = max(makespan(p, m), 3 * placement.chunks * m + p - 1)
                compiled = compile_schedule(
                    p, m, costs_of(placement, UNIT), peak(p), placements=[placement], trials=0
                )
                found = compiled.timeline.makespan
                met, shorter, missed = (
                    met + (found == goal),
                    shorter + (found < goal),
                    missed + (found > goal),
                )
        rows.append((name, met, shorter, missed))
    return table(("family", "equal", "shorter", "longer"), rows)
