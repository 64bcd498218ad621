"""How good are compiled schedules?  Writes results/schedules.md and results/schedules.png.

    python benchmarks/schedules.py

One process, no GPU; about ten minutes on one core.  Every compiled schedule is simulated by
``schedule.simulate``; nothing comes from the cache.
"""

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.compile import Compiled, compile_schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement, linear, v
from megatron_pp_ext.schedule.simulate import Timeline, simulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(ROOT / "tests" / "schedule"))
from published import MEASURED_COST, UNIT_COST  # noqa: E402

Times = tuple[float, float, float, float]
UNIT: Times = (1, 1, 1, 0)
UNEQUAL: Times = (10, 11, 7, 1)

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

# Adaptive building-block search (sail-sg/zero-bubble-pipeline-parallelism) where UNIT_COST has another.
ADAPTIVE = [(8, 8, 57, 55, 14), (8, 16, 103, 96, 16), (4, 8, 51, 48, 8)]

PROFILES: dict[str, Times] = {
    "1, 1.1, .7, hop .05": (1, 1.1, 0.7, 0.05),
    "1, 1, .5, hop 0": (1, 1, 0.5, 0),
    "1, 2, 1, hop .1": (1, 2, 1, 0.1),
    "1.5B (ms)": (18.522, 18.086, 9.337, 0.601),
    "6.2B (ms)": (29.718, 29.444, 19.927, 0.527),
    "14.6B (ms)": (11.347, 11.248, 8.132, 0.377),
    "28.3B (ms)": (10.419, 10.207, 7.715, 0.408),
}

FRONTIER_TRIALS = 300
"""Fewer than the default: the frontier has some hundred and fifty points."""

Row = Sequence[object]


def costs_of(placement: Placement, times: Times) -> Costs:
    """The same ``times`` (F, I, W, hop) for every stage of ``placement``."""
    forward, i, w, hop = times
    return Costs.uniform(placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def verdict(found: float, goal: float) -> str:
    """How a makespan compares with the one to reach."""
    if found < goal * (1 - 1e-9):
        return f"{100 * (1 - found / goal):.1f}% shorter"
    return "met" if found <= goal * (1 + 1e-9) else f"**{100 * (found / goal - 1):.1f}% longer**"


def closed_forms() -> str:
    """Unit cost, p = 2..16, m = 2p, 4p, 8p: at each family's peak, its closed form or better."""
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
            for m in (2 * p, 4 * p, 8 * p):
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


def published() -> str:
    """Unit cost: each published schedule against the compiled one at the same peak."""
    rows: list[Row] = []
    cases = [
        (name, catalog.ENTRIES[name].chunks, case) for name, cases in UNIT_COST.items() for case in cases
    ]
    cases += [("adaptive block search", 2, case) for case in ADAPTIVE]
    for name, chunks, (p, m, makespan, _, peak) in cases:
        cut = linear(p) if chunks == 1 else v(p)
        compiled = compile_schedule(p, m, costs_of(cut, UNIT), peak)
        found = compiled.timeline.makespan
        rows.append((name, p, m, peak, makespan, found, compiled.lower_bound, verdict(found, makespan)))
    return table(("schedule", "p", "m", "peak", "published", "compiled", "lower bound", ""), rows)


def best_known() -> str:
    """The best known makespans, proved optimal or not."""
    rows: list[Row] = []
    for p, m, times, goals in BEST_KNOWN:
        for limit, goal in goals.items():
            compiled, seconds = timed(p, m, costs_of(v(p), times), limit)
            rows.append(("v", p, m, times, limit, goal, *_outcome(compiled, goal), f"{seconds:.1f}"))
    for p, m, goals in BEST_KNOWN_WAVE:
        quarters = Costs((StageCosts(0.25, 0.25, 0.25, 0.25),) * (4 * p))
        for limit, goal in goals.items():
            compiled, seconds = timed(p, m, quarters, limit)
            outcome = _outcome(compiled, goal)
            rows.append(("4 chunks", p, m, "unit, whole stages", limit, goal, *outcome, f"{seconds:.1f}"))
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
        "s",
    )
    return table(head, rows)


def _outcome(compiled: Compiled, goal: float) -> Row:
    found = compiled.timeline.makespan
    return found, compiled.lower_bound, verdict(found, goal), compiled.origin


def timed(p: int, m: int, costs: Costs, limit: float) -> tuple[Compiled, float]:
    """A compilation and the seconds of processor time it took."""
    start = time.process_time()
    compiled = compile_schedule(p, m, costs, limit)
    return compiled, time.process_time() - start


def unequal_costs() -> str:
    """Families at other costs, and the compiled schedule at the same peak, p = 8, m = 16."""
    p, m = 8, 16
    rows: list[Row] = []
    for label, times in PROFILES.items():
        for name in ("1f1b", "zb-h1", "interleaved-zb", "v-min", "v-half", "v-zb"):
            family = catalog.build(name, p, m)
            costs = costs_of(v(p), times)
            timeline = simulate(family, costs.merged(family.placement.stages))
            peak = max(timeline.peak_activations)
            compiled = compile_schedule(p, m, costs, peak, trials=FRONTIER_TRIALS)
            found = compiled.timeline.makespan
            outcome = verdict(found, timeline.makespan)
            rows.append((label, name, peak, timeline.makespan, found, compiled.lower_bound, outcome))
    return table(("costs", "family", "peak (half stages)", "family's", "compiled", "lower bound", ""), rows)


def table5() -> str:
    """Bubble rates of arXiv 2401.10241, table 5, in the longest span."""
    rows: list[Row] = []
    for p, m, forward, i, w, hop, rates in MEASURED_COST:
        costs = costs_of(linear(p), (forward, i, w, hop))
        for name, rate in rates.items():
            ours = round(simulate(catalog.build(name, p, m), costs).bubble_span, 4)
            rows.append(
                (p, m, name, f"{rate:.4f}", f"{ours:.4f}", "met" if ours == rate else f"{ours - rate:+.4f}")
            )
    return table(("p", "m", "schedule", "paper", "simulated", ""), rows)


def memory_limited() -> str:
    """The same pipelines compiled for 1F1B's memory and twice it, with linear and with V placement."""
    rows: list[Row] = []
    for p, m, forward, i, w, hop, _ in MEASURED_COST:
        halves = Costs((StageCosts(forward / 2, i / 2, w / 2, 0.5),) * (2 * p), hop)
        for limit in (p, 2 * p):
            for places in ([linear(p)], [v(p)]):
                timeline = compile_schedule(p, m, halves, limit, placements=places, trials=100).timeline
                place = str(places[0].shape)
                rows.append((p, m, limit, place, f"{timeline.bubble_span:.4f}", f"{timeline.bubble:.4f}"))
    return table(("p", "m", "limit (stages)", "placement", "bubble in span", "bubble in makespan"), rows)


def frontier(
    times: Times,
) -> Iterator[tuple[int, int, list[tuple[int, float, float]], dict[str, Timeline]]]:
    """(p, m, [(limit, makespan, bound)], families): limits in half-stage activations up to 1F1B's."""
    for p in (4, 8, 16):
        for m in (2 * p, 4 * p):
            costs = costs_of(v(p), times)
            limits = range(2, 2 * p + 1, 2 if p == 16 else 1)
            points = []
            for limit in limits:
                compiled = compile_schedule(p, m, costs, limit, trials=FRONTIER_TRIALS)
                points.append((limit, compiled.timeline.makespan, compiled.lower_bound))
            families = {}
            for name in ("1f1b", "zb-h1", "interleaved-zb", "v-min", "v-half", "v-zb"):
                schedule = catalog.build(name, p, m)
                families[name] = simulate(schedule, costs.merged(schedule.placement.stages))
            yield p, m, points, families


def frontiers(path: Path) -> str:
    """Tables of the frontier, and its picture at ``path``."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 6)
    parts = []
    for row, times in enumerate((UNIT, UNEQUAL)):
        for column, (p, m, points, families) in enumerate(frontier(times)):
            plot = axes[row][column]
            most = 2 * p
            plot.plot([x / most for x, _, _ in points], [y for _, y, _ in points], ".-", label="compiled")
            plot.plot([x / most for x, _, _ in points], [z for *_, z in points], ":", label="lower bound")
            lines = []
            for name, timeline in families.items():
                peak = max(timeline.peak_activations)
                if peak <= most:
                    plot.plot([peak / most], [timeline.makespan], "x", label=name)
            for limit, makespan, bound in points:
                fitting = [
                    (timeline.makespan, name)
                    for name, timeline in families.items()
                    if max(timeline.peak_activations) <= limit
                ]
                best = "{:.6g} ({})".format(*min(fitting)) if fitting else "none fits"
                lines.append((limit, makespan, bound, best))
            plot.set_title(f"p={p}, m={m}, (F, I, W, hop)={times}", fontsize=8)
            plot.set_ylim(0.97 * points[-1][2], min(points[0][1], 2.2 * points[-1][1]))
            plot.set_xlabel("memory, of 1F1B's", fontsize=8)
            parts.append(f"p = {p}, m = {m}, F, I, W, hop = {times}\n")
            parts.append(
                table(("limit (half stages)", "compiled", "lower bound", "best family"), lines) + "\n"
            )
    axes[0][0].set_ylabel("makespan")
    axes[1][0].set_ylabel("makespan")
    axes[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return "\n".join(parts)


def speed() -> str:
    """Time and memory of whole processes that compile one schedule."""
    rows: list[Row] = []
    for p, m, limit, times in ((16, 64, 12, UNEQUAL), (16, 64, 18, UNEQUAL), (64, 512, 44, UNEQUAL)):
        program = (
            "from megatron_pp_ext.schedule.compile import compile_schedule; "
            "from megatron_pp_ext.schedule.costs import Costs; "
            "from megatron_pp_ext.schedule.placement import v; "
            f"costs = Costs.uniform(v({p}), forward={times[0]}, input_gradient={times[1]}, "
            f"weight_gradient={times[2]}, hop={times[3]}); "
            f"found = compile_schedule({p}, {m}, costs, {limit}); "
            "print(found.timeline.makespan, found.lower_bound, found.origin, sep='; ')"
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        makespan, bound, origin = run.stdout.strip().split("; ")
        rows.append((p, m, times, limit, makespan, bound, origin, f"{seconds:.1f}", after.ru_maxrss // 1024))
    head = (
        "p",
        "m",
        "F, I, W, hop",
        "limit",
        "makespan",
        "lower bound",
        "origin",
        "processor s",
        "MiB so far",
    )
    return table(head, rows)


def machine() -> str:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        name = models[0] if models else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores (one used), Python {platform.python_version()}"


def main() -> None:
    """Write the report."""
    RESULTS.mkdir(exist_ok=True)
    sections = {
        "Speed": speed,
        "Best known makespans": best_known,
        "Published schedules at unit cost": published,
        "Closed forms at unit cost, p = 2..16, m = 2p, 4p, 8p": closed_forms,
        "Other costs, p = 8, m = 16": unequal_costs,
        "Bubble rates of arXiv 2401.10241, table 5": table5,
        "The same pipelines under a memory limit": memory_limited,
        "Frontier": lambda: frontiers(RESULTS / "schedules.png"),
    }
    parts = [
        "# Compiled schedules",
        f"`python benchmarks/schedules.py` on {machine()}, {datetime.now(UTC):%Y-%m-%d}.  "
        "Lengths are makespans, first start to last end over all ranks, unless a column says span.  "
        "Times are those of one chunk's action.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_PP_EXT_CACHE"] = folder
        for title, section in sections.items():
            start = time.process_time()
            text = section()
            print(f"{title}: {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
            parts += [f"## {title}", (section.__doc__ or "").strip() or "![frontier](schedules.png)", text]
    (RESULTS / "schedules.md").write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
