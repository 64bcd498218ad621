"""What becomes of a step and its memory where activations wait on the host, and whether the goals are met.

    python -m benchmarks.schedules.copies_to_host

Every family of up to two chunks a rank, 8 ranks, 32 microbatches, F = I = W = 1 for a whole rank; messages
take no time.  One process, no GPU; a minute on one core.  Writes results/offload.md.
"""

from collections.abc import Iterator

import typer

from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.compiler.offloaded import shortest_within
from megatron_pp_ext.schedule import catalog, offload
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate

RANKS, MICROBATCHES = 8, 32
COPIES = 0.25, 0.5, 1.0
SHARES = 0.25, 0.5, 0.75, 1.0
LIMITS = 6.0, 4.0, 3.0, 2.0, 1.5, 1.0


def costs(chunks: int, copy: float) -> Costs:
    """Return costs of 1 for the F, I and W of a rank, and ``copy`` for all of its activations."""
    return Costs.per_rank(RANKS, chunks).copied_at(copy)


def planned(name: str, copy: float, share: float) -> tuple[Timeline, Timeline]:
    """Return the family without copies, and with this share of its activations on the host."""
    schedule = catalog.build(name, RANKS, MICROBATCHES)
    own = costs(schedule.placement.chunks, copy)
    return simulate(schedule, own), offload.with_share(schedule, own, share)


def shares() -> str:
    """The share that leaves where this share is asked for, and the peak of the fullest rank, in microbatches.

    A copy takes so much of a rank's F each way.  What would be late stays.  The growth is a row's longest.
    """
    rows = list[Row]()
    for name in catalog.NAMES:
        for copy in COPIES:
            found = [planned(name, copy, share) for share in SHARES]
            growth = max(timeline.makespan / alone.makespan - 1 for alone, timeline in found)
            cells = (
                f"{offload.share_away(line):.0%}, {max(line.peak_microbatches):.4g}" for _, line in found
            )
            rows.append((name, copy, f"{max(found[0][0].peak_microbatches):.4g}", *cells, f"{growth:.1%}"))
    return table(("schedule", "copy", "peak", *(f"{share:.0%}" for share in SHARES), "growth"), rows)


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
            found = within(limit, copy)
            row.append(
                f"{found.makespan / v_zb() - 1:+.1%} ({found.schedule.name})" if found else "none found"
            )
        rows.append(row)
    return table(("limit", *(f"copy {copy}" for copy in COPIES)), rows)


def v_zb() -> float:
    """Return the step of V-ZB."""
    return simulate(catalog.build("v-zb", RANKS, MICROBATCHES), costs(2, 0.0)).makespan


def goals() -> str:
    """What stays in place of all waits for less than a copy there and one back."""
    return table(("goal", "found", ""), list(_goals()))


def _goals() -> Iterator[Row]:
    halves = {name: planned(name, 0.5, 0.5) for name in catalog.NAMES}
    growth = max(timeline.makespan / alone.makespan - 1 for alone, timeline in halves.values())
    least = min(halves, key=lambda name: offload.share_away(halves[name][1]))
    away = offload.share_away(halves[least][1])
    found = f"{away:.1%} of {least} at the least, {growth:.1%} longer"
    yield (
        "half of any family for 1% of the step, copy half of F",
        found,
        verdict(away >= 0.5 and growth <= 0.01),
    )
    whole = {name: offload.share_away(planned(name, 1.0, 1.0)[1]) for name in catalog.NAMES}
    missing = ", ".join(f"{name} {share:.0%}" for name, share in whole.items() if share < 1)
    yield "all of any family, copy a third of F + I + W", missing or "all", verdict(not missing)
    quarter = within(2.0, 0.5)
    over = quarter.makespan / v_zb() - 1 if quarter else float("inf")
    yield "a quarter of 1F1B's memory within 3% of V-ZB, copy half of F", f"{over:.1%}", verdict(over <= 0.03)


def verdict(is_met: bool) -> str:
    """Return in a word whether a goal is met."""
    return "met" if is_met else "**missed**"


def main(out: Out = RESULTS / "offload.md") -> None:
    """Plan, compare and write the tables."""
    about = "Simulated: F, I and W of a rank take 1 each, 8 ranks, 32 microbatches."
    parts = {"Goals": goals, "Shares": shares, "Limits": limits}
    publish(out, "Activations on the host", about, *sections(parts))


if __name__ == "__main__":
    typer.run(main)
