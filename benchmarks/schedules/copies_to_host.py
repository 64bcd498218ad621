"""What becomes of a step and its memory where activations wait on the host, and whether the goals are met.

    python -m benchmarks.schedules.copies_to_host

Every family of up to two chunks a rank, 8 ranks, 32 microbatches, F = I = W = 1 for a whole rank; messages
take no time.  One process, no GPU; a minute on one core.  Writes results/offload.md.
"""

from collections.abc import Iterator

import typer

from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.features.offload import copies as offload
from megatron_pp_ext.features.offload.copies import with_whole_share, within_limits
from megatron_pp_ext.features.offload.order import shortest_within
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate

RANKS, MICROBATCHES = 8, 32
COPIES = 0.25, 0.5, 1.0
SHARES = 0.25, 0.5, 0.75, 1.0
SLOW_COPIES = 0.5, 1.0, 1.5
LIMITS = 6.0, 4.0, 3.0, 2.0, 1.5, 1.0


def costs(chunks: int, copy: float) -> Costs:
    """Return costs of 1 for the F, I and W of a rank, and ``copy`` for all of its activations."""
    return Costs.per_rank(RANKS, chunks).copied_at(copy)


def planned(name: str, copy: float, share: float) -> tuple[Timeline, Timeline]:
    """Return the family without copies, and with this share of its activations on the host."""
    schedule = catalog.build(name, RANKS, MICROBATCHES)
    unit_costs = costs(schedule.placement.chunks, copy)
    return simulate(schedule, unit_costs), with_whole_share(schedule, unit_costs, share)


def shares() -> str:
    """The peak of the fullest rank, in microbatches, and the growth of the step where this share leaves.

    A copy takes so much of a rank's F each way.  The last column is what leaves for no time (`auto`), and the
    peak then.
    """
    rows = list[Row]()
    for name in catalog.NAMES:
        for copy in COPIES:
            steps = [planned(name, copy, share) for share in SHARES]
            whole = steps[0][0]
            cells = (
                f"{max(line.peak_microbatches):.4g}, {max(0.0, line.makespan / whole.makespan - 1):.1%}"
                for _, line in steps
            )
            free = offload.with_share(whole.schedule, whole.costs, 1.0)
            auto = f"{offload.share_offloaded(free):.0%}, {max(free.peak_microbatches):.4g}"
            rows.append((name, copy, f"{max(whole.peak_microbatches):.4g}", *cells, auto))
    return table(("schedule", "copy", "peak", *(f"{share:.0%}" for share in SHARES), "auto"), rows)


def own_limits() -> str:
    """How much longer a step gets where copies keep a limit, in microbatches; a dash where none do.

    A copy takes so much of a rank's F each way.  What a W still needs is on the device, so that families
    which put off many W keep no low limit in their own order.
    """
    rows = list[Row]()
    for name in catalog.NAMES:
        schedule = catalog.build(name, RANKS, MICROBATCHES)
        for copy in SLOW_COPIES:
            unit_costs = costs(schedule.placement.chunks, copy)
            whole = simulate(schedule, unit_costs).makespan
            steps = [within_limits(schedule, unit_costs, [limit] * RANKS) for limit in LIMITS]
            cells = (f"{max(0.0, line.makespan / whole - 1):.1%}" if line else "-" for line in steps)
            rows.append((name, copy, *cells))
    return table(("schedule", "copy", *(f"{limit:g}" for limit in LIMITS)), rows)


def within(limit: float, copy: float) -> Timeline | None:
    """Return the shortest step within ``limit`` microbatches in the order of any family."""
    families = [catalog.build(name, RANKS, MICROBATCHES) for name in catalog.NAMES]
    return shortest_within(families, costs(2, copy), [limit] * RANKS)


def limits() -> str:
    """The shortest step within a limit, in microbatches (1F1B keeps 8), over V-ZB's of 99.5 without one."""
    rows = list[Row]()
    for limit in LIMITS:
        row: list[object] = [limit]
        for copy in COPIES:
            best = within(limit, copy)
            row.append(f"{best.makespan / v_zb() - 1:+.1%} ({best.schedule.name})" if best else "none found")
        rows.append(row)
    return table(("limit", *(f"copy {copy}" for copy in COPIES)), rows)


def v_zb() -> float:
    """Return the step of V-ZB."""
    return simulate(catalog.build("v-zb", RANKS, MICROBATCHES), costs(2, 0.0)).makespan


def goals() -> str:
    """A share that is asked for leaves whole."""
    return table(("goal", "found", ""), list(_goals()))


def _goals() -> Iterator[Row]:
    halves = {name: planned(name, 0.5, 0.5) for name in catalog.NAMES}
    growth = max(timeline.makespan / whole.makespan - 1 for whole, timeline in halves.values())
    least = min(halves, key=lambda name: offload.share_offloaded(halves[name][1]))
    away = offload.share_offloaded(halves[least][1])
    outcome = f"{away:.1%} of {least} at the least, {growth:.1%} longer"
    yield (
        "half of any family for 1% of the step, copy half of F",
        outcome,
        verdict(away >= 0.5 and growth <= 0.01),
    )
    whole = {name: planned(name, 1.0, 1.0) for name in catalog.NAMES}
    grown = {name: timeline.makespan / whole.makespan - 1 for name, (whole, timeline) in whole.items()}
    are_all = all(offload.share_offloaded(timeline) == 1 for _, timeline in whole.values())
    longer = ", ".join(f"{name} {growth:.1%}" for name, growth in grown.items() if growth > 5e-4)
    outcome = f"{'all' if are_all else 'not all'} of any family; longer: {longer or 'none'}"
    yield "all of any family, copy a third of F + I + W", outcome, verdict(are_all)
    quarter = within(2.0, 0.5)
    over = quarter.makespan / v_zb() - 1 if quarter else float("inf")
    yield "a quarter of 1F1B's memory within 3% of V-ZB, copy half of F", f"{over:.1%}", verdict(over <= 0.03)


def verdict(is_met: bool) -> str:
    """Return in a word whether a goal is met."""
    return "met" if is_met else "**missed**"


def main(out: Out = RESULTS / "offload.md") -> None:
    """Plan, compare and write the tables."""
    about = "Simulated: F, I and W of a rank take 1 each, 8 ranks, 32 microbatches."
    parts = {"Goals": goals, "Shares": shares, "Limits": own_limits, "The shortest step of all": limits}
    publish(out, "Activations on the host", about, *sections(parts))


if __name__ == "__main__":
    typer.run(main)
