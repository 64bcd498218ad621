"""The page that a hunt writes, and the lines that it prints for a case."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report import table
from tests.hunt.fuzz import job
from tests.hunt.fuzz.factors import FLAGS, Row, unusual
from tests.hunt.fuzz.trial import Kind, Outcome

Found = tuple[int, Row, Outcome]
"""A case's number, its row and what came of it."""


def described(row: Row) -> str:
    """What is not plain in ``row``, as flags where a choice is made of flags."""
    parts = [f"{job.ranks(row)} ranks, --pipeline-model-parallel-size {row['pipeline']}"]
    parts.append(f"schedule {row['schedule']}")
    parts += [f"{what} {row[what]}" for what in ("measures", "resume") if row[what] != "none"]
    for factor in unusual(row):
        flags = FLAGS.get(factor, {}).get(row[factor], "")
        if factor != "pipeline":
            parts.append(flags or f"{factor} {row[factor]}")
    return "; ".join(parts)


def repeated(seed: int, number: int) -> str:
    """The command that repeats a case."""
    return f"make fuzz SEED={seed} CASE={number}"


def told(seed: int, found: Found, minimal: Row | None = None) -> str:
    """Several lines on a case, which end with the command that repeats it."""
    number, row, outcome = found
    lines = [f"case {number} {outcome.kind}: {described(row)}", *(f"    {line}" for line in outcome.lines)]
    if minimal is not None:
        lines.append(f"  the least that shows it: {described(minimal)}")
    return "\n".join([*lines, f"  again: {repeated(seed, number)}"])


def sections(seed: int, cases: Sequence[Found], minimal: Mapping[int, Row]) -> list[str]:
    """The sections of the page: what came of the cases, by schedule and by choice, and all findings."""
    seconds = sum(outcome.seconds for _, _, outcome in cases)
    counts = Counter(outcome.kind for _, _, outcome in cases)
    told_of = [
        f"```text\n{told(seed, found, minimal.get(found[0]))}\n```"
        for found in cases
        if found[2].kind.is_finding
    ]
    refusals = Counter(outcome.lines[0] for _, _, outcome in cases if outcome.kind is Kind.REFUSED)
    return [
        f"{len(cases)} cases took {seconds:.0f} seconds, {seconds / max(1, len(cases)):.1f} each.",
        table(["what came of a case", "cases"], [(kind, counts[kind]) for kind in Kind]),
        "## By schedule\n\n" + _by((row["schedule"].split()[0], outcome) for _, row, outcome in cases),
        "## By the schedule that goes on from a checkpoint\n\n"
        + _by((row["resume"].split()[0], outcome) for _, row, outcome in cases if row["resume"] != "none"),
        "## By choice\n\n"
        + _by(
            (f"{factor}: {row[factor]}", outcome)
            for _, row, outcome in cases
            for factor in ("measures", *unusual(row))
        ),
        "## Refusals\n\n" + table(["refusal", "cases"], sorted(refusals.items())),
        "## Findings\n\n" + ("\n\n".join(told_of) or "None."),
    ]


def _by(named: Iterable[tuple[str, Outcome]]) -> str:
    """A table of the outcomes by their names."""
    counts: dict[str, Counter[Kind]] = {}
    for name, outcome in named:
        counts.setdefault(name, Counter())[outcome.kind] += 1
    rows = [
        (
            name,
            kinds[Kind.EQUAL] + kinds[Kind.NOISE],
            kinds[Kind.REFUSED],
            sum(count for kind, count in kinds.items() if kind.is_finding),
        )
        for name, kinds in sorted(counts.items())
    ]
    return table(["", "equal", "refused", "findings"], rows)
