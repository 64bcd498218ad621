"""What the cases came to, in a line each and as a page."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import publish, table
from tests.hunt.faults.cases import FAULTS, MOMENTS, RUNNERS, SAVES
from tests.hunt.faults.rank import PATIENCE
from tests.hunt.faults.trial import Outcome

ABOUT = """
Each case trains a small GPT for 6 steps on 2 to 4 ranks, with a checkpoint and an evaluation after every
second step. One rank hits itself with a signal at a random call of a function in a train step, a copy of
activations to the host or back, a save or an evaluation. `killed` is SIGKILL, `terminated` SIGTERM,
`stopped` SIGSTOP for good, `paused` SIGSTOP for a second, and `asked to exit` SIGTERM under
--exit-signal-handler.

Afterwards all ranks have to have ended, and no process may be left. The checkpoint that the tracker file
names has to load. The run that goes on from it must have the losses of one that nobody hit, bit for bit,
and together with what was trained before it the samples of stock's run, each once. Without a flush its
losses are compared with those of a run that was resumed at the same step. A checkpoint that was half
written, and that the resumed run wrote once more, is loaded too."""


def line_of(outcome: Outcome) -> str:
    """Say in one line what was drawn and what happened."""
    verdict = "; ".join(outcome.problems) or "as it should be"
    return f"{outcome.case} ({outcome.hit}); resumed at {outcome.resumed_at}: {verdict}"


def write(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write the page of these cases."""
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    about = f"{wrong} of {len(outcomes)} cases went wrong.\n{ABOUT}"
    parts = {
        "How many cases went wrong, of how many": _counts(outcomes),
        f"Seconds from the signal to the end of the last rank, of which each waits {PATIENCE:g} for others": (
            _seconds(outcomes)
        ),
        "The cases": _cases(outcomes),
    }
    sections = [text for title, part in parts.items() for text in (f"## {title}", part)]
    publish(file, "Ranks that are killed, stopped or terminated", about, *sections)


def _counts(outcomes: Sequence[Outcome]) -> str:
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for outcome in outcomes:
        case, wrong = outcome.case, bool(outcome.problems)
        cells[case.runner, f"{case.save} {case.moment}"].append(wrong)
        cells[case.runner, case.fault].append(wrong)
    columns = [*(f"{save} {moment}" for moment in MOMENTS for save in SAVES), *FAULTS]

    def count(cell: list[bool]) -> str:
        return f"{sum(cell)} / {len(cell)}" if cell else ""

    rows = [[runner, *(count(cells[runner, column]) for column in columns)] for runner in RUNNERS]
    return table(["runner", *columns], rows)


def _seconds(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for fault in (name for name, fault in FAULTS.items() if fault.ends):
        seconds = sorted(one.seconds for one in outcomes if one.case.fault == fault and one.hit)
        if seconds:
            rows.append((fault, f"{seconds[len(seconds) // 2]:.1f}", f"{seconds[-1]:.1f}"))
    return table(("fault", "median", "longest"), rows)


def _cases(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (number, one.case, one.hit, one.resumed_at, one.written_twice or "", "; ".join(one.problems))
        for number, one in enumerate(outcomes)
    ]
    return table(("", "case", "where the rank was", "resumed at", "written twice", "what went wrong"), rows)
