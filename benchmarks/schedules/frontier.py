"""What is the shortest makespan at every memory limit?  Tables and a picture."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.report import table
from benchmarks.schedules.comparison import FEWER_TRIALS, UNEQUAL, UNIT, Times, costs_of
from megatron_pp_ext.compiler.compile import Compiled, compile_schedule
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import v
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import figure as figures

FAMILIES = ("1f1b", "zb-h1", "interleaved-zb", "v-min", "v-half", "v-zb")


def points(times: Times) -> Iterator[tuple[int, int, dict[int, Compiled], dict[str, Timeline]]]:
    """Yield p, m, the compiled schedule for each limit, and the families; limits are in half stages."""
    for p in (4, 8, 16):
        for m in (2 * p, 4 * p):
            costs = costs_of(v(p), times)
            limits = range(2, 2 * p + 1, 2 if p == 16 else 1)
            compiled: list[Compiled] = []
            for limit in limits:
                new = compile_schedule(p, m, costs, limit, trials=FEWER_TRIALS)
                if compiled and compiled[-1].timeline.makespan < new.timeline.makespan:
                    # What is shorter for less memory is the best for more of it, too.
                    bound = min(new.lower_bound, compiled[-1].timeline.makespan)
                    new = replace(compiled[-1], lower_bound=bound)
                compiled.append(new)
            built = [catalog.build(name, p, m) for name in FAMILIES]
            families = {
                schedule.name: simulate(schedule, costs.merged(schedule.placement.stages))
                for schedule in built
            }
            yield p, m, dict(zip(limits, compiled, strict=True)), families


def frontiers(path: Path) -> str:
    """Return tables of the frontier, and draw its picture at ``path``."""
    figure = figures.new_figure(18, 7.5)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(2, 6)
    parts = []
    for row, times in enumerate((UNIT, UNEQUAL)):
        for column, (p, m, by_limit, families) in enumerate(points(times)):
            plot = axes[row][column]
            shares = [limit / (2 * p) for limit in by_limit]
            makespans = [compiled.timeline.makespan for compiled in by_limit.values()]
            bounds = [compiled.lower_bound for compiled in by_limit.values()]
            plot.plot(shares, makespans, ".-", label="compiled")
            plot.plot(shares, bounds, ":", label="lower bound")
            peaks = {name: max(timeline.peak_activations) for name, timeline in families.items()}
            for name, timeline in families.items():
                if peaks[name] <= 2 * p:
                    plot.plot([peaks[name] / (2 * p)], [timeline.makespan], "x", label=name)
            plot.set_title(f"p = {p}, m = {m}", fontsize=9)
            plot.set_ylim(0.97 * bounds[-1], min(makespans[0], 2.2 * makespans[-1]))
            lines = []
            for limit, compiled in by_limit.items():
                fitting = [(families[name].makespan, name) for name in families if peaks[name] <= limit]
                best = "{:.6g} ({})".format(*min(fitting)) if fitting else "none fits"
                lines.append((limit, compiled.timeline.makespan, compiled.lower_bound, best))
            head = ("limit (half stages)", "compiled", "lower bound", "best family")
            parts.append(f"p = {p}, m = {m}, F, I, W, hop = {times}\n\n{table(head, lines)}\n")
        axes[row][0].set_ylabel(f"makespan at F, I, W, hop = {times}", fontsize=9)
    figure.supxlabel("memory limit, of 1F1B's peak", fontsize=9)
    axes[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return "\n".join(parts)
