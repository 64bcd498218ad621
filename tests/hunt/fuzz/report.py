"""The page that a hunt writes, and the lines that it prints for a case."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.report import table
from tests.hunt.fuzz import job
from tests.hunt.fuzz.factors import FLAGS, Row, unusual
from tests.hunt.fuzz.trial import Kind, Outcome


class Found(NamedTuple):
    """A case's number, its row, what came of it, and the least that shows that, if it was looked for."""

    number: int
    row: Row
    outcome: Outcome
    least: Row | None = None


def described(row: Row) -> str:
    """What is not plain in ``row``, as flags where a choice is made of flags."""
    parts = [f"{job.ranks(row)} ranks, --pipeline-model-parallel-size {row['pipeline']}"]
    parts.append(f"schedule {row['schedule']}")
    parts += [
        f"{what} {row[what]}"
        for what in ("measures", "resume", "host", "order", "slices", "graphs")
        if row[what] != "none"
    ]
    for factor in unusual(row):
        if factor != "pipeline":
            parts.append(FLAGS.get(factor, {}).get(row[factor], "") or f"{factor} {row[factor]}")
    return "; ".join(parts)


def told(seed: int, found: Found) -> str:
    """Several lines on a case, which end with the command that repeats it."""
    number, row, outcome, least = found
    lines = [f"case {number} {outcome.kind}: {described(row)}", *(f"    {line}" for line in outcome.lines)]
    if least is not None:
        lines.append(f"  the least that shows it: {described(least)}")
    return "\n".join([*lines, f"  again: make fuzz SEED={seed} CASE={number}"])


def sections(seed: int, cases: Sequence[Found]) -> list[str]:
    """The sections of the page: what came of the cases, by schedule and by choice, and all findings."""
    seconds = sum(case.outcome.seconds for case in cases)
    counts = Counter(case.outcome.kind for case in cases)
    findings = [f"```text\n{told(seed, case)}\n```" for case in cases if case.outcome.kind.is_finding]
    refusals = Counter(case.outcome.lines[0] for case in cases if case.outcome.kind is Kind.REFUSED)
    named = [(case.outcome, case.row) for case in cases]
    choices = [
        (outcome, f"{factor}: {row[factor]}")
        for outcome, row in named
        for factor in ("measures", "host", "order", "slices", "graphs", *unusual(row))
    ]
    return [
        f"{len(cases)} cases took {seconds:.0f} seconds, {seconds / max(1, len(cases)):.1f} each.",
        table(["what came of a case", "cases"], [(kind, counts[kind]) for kind in Kind]),
        _by("schedule", [(outcome, row["schedule"].split()[0]) for outcome, row in named]),
        _by(
            "the schedule that goes on from a checkpoint",
            [(outcome, row["resume"].split()[0]) for outcome, row in named if row["resume"] != "none"],
        ),
        _by("choice", choices),
        "## Refusals\n\n" + table(["refusal", "cases"], sorted(refusals.items())),
        "## Findings\n\n" + ("\n\n".join(findings) or "None."),
    ]


def _by(what: str, named: Iterable[tuple[Outcome, str]]) -> str:
    """A section with a table of the outcomes by their names."""
    kinds: dict[str, list[Kind]] = {}
    for outcome, name in named:
        kinds.setdefault(name, []).append(outcome.kind)
    rows = []
    for name, found in sorted(kinds.items()):
        findings, refused = sum(kind.is_finding for kind in found), found.count(Kind.REFUSED)
        rows.append((name, len(found) - findings - refused, refused, findings))
    return f"## By {what}\n\n" + table(["", "equal", "refused", "findings"], rows)
