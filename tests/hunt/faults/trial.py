"""Runs one case, resumes what it leaves, and compares with runs that nobody hit."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.hunt.faults import jobs
from tests.hunt.faults.cases import FAULTS, RUNNERS, STEPS, Case
from tests.hunt.faults.rank import Orders
from tests.hunt.faults.strike import Strike
from tests.hunt.faults.trained import (
    BrokenRun,
    Trained,
    all_samples,
    expected,
    flags_of,
    last_words,
    stock_samples,
    train,
    whole,
)
from tests.support.few_trials import few_trials

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class Outcome:
    """What came of a case: where the rank was, how long the others lived, and what was wrong."""

    case: Case
    hit: str | None = None
    seconds: float = 0.0
    resumed_at: int | None = None
    written_twice: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def try_case(case: Case) -> Outcome:
    """Run ``case`` and all that tells whether its end was as it should be."""
    outcome = Outcome(case)
    with tempfile.TemporaryDirectory(prefix="fault-") as folder, few_trials(f"{folder}/compiled"):
        try:
            outcome.problems += _problems(outcome, Path(folder))
        except BrokenRun as error:
            outcome.problems.append(str(error))
    return outcome


def _problems(outcome: Outcome, folder: Path) -> Iterator[str]:
    case, runner = outcome.case, RUNNERS[outcome.case.runner]
    checkpoints, samples = folder / "checkpoints", folder / "samples"
    samples.mkdir()
    flags = flags_of(runner, case.save, checkpoints)

    yield from _problems_of_the_end(outcome, _hit(case, flags, folder / "hit", samples))

    begun = {int(file.name.removeprefix("iter_")) for file in checkpoints.glob("iter_*")}
    saved = outcome.resumed_at = _tracked(checkpoints)
    if case.save == "sync" and sorted(begun)[-2:-1] > [saved]:
        yield f"the tracker names {saved}, with {sorted(begun)} begun"
    resumed = train(runner, [*flags, "--load", str(checkpoints)] if saved else flags)
    yield from _differences(f"resumed at {saved}", resumed, expected(runner, (saved,)))
    used = {step: rows for step, rows in all_samples(samples).items() if step < saved} | resumed.samples
    yield from miscounted(used, stock_samples(runner))
    # What was half written has been written once more, over what was left.
    outcome.written_twice = sorted(step for step in begun if saved < step < STEPS)
    for step in outcome.written_twice:
        again = train(runner, [*flags, "--load", str(checkpoints), "--ckpt-step", str(step)])
        yield from _differences(f"resumed at {step}, written twice", again, expected(runner, (saved, step)))


def _hit(case: Case, flags: list[str], file: Path, samples: Path) -> jobs.Ended:
    fault, runner = FAULTS[case.fault], RUNNERS[case.runner]
    reference = whole(runner, case.save if case.moment == "save" else "sync")
    calls = reference.calls[case.victim][case.moment]
    strike = Strike(case.moment, 1 + int(case.at * calls), fault.signal, file)
    orders = Orders([*flags, *fault.flags], samples, case.victim, strike)
    return jobs.run(runner.ranks, orders, case.launcher, paused=case.fault == "paused")


def _problems_of_the_end(outcome: Outcome, ended: jobs.Ended) -> Iterator[str]:
    fault, runner = FAULTS[outcome.case.fault], RUNNERS[outcome.case.runner]
    if ended.hit is None:
        yield f"the rank was not hit: {last_words(ended.story)}"
        return
    outcome.hit, outcome.seconds = ended.hit, ended.seconds
    hanging = [name for name, status in ended.statuses.items() if status is None]
    failed = {name: status for name, status in ended.statuses.items() if status}
    if hanging:
        yield f"{', '.join(hanging)} did not end"
    if fault.ends and not failed:
        yield "no rank failed"
    if not fault.ends and failed:
        yield f"{failed} failed: {last_words(ended.story)}"
    if ended.left:
        yield f"{len(ended.left)} processes outlived the job"
    if ended.results:
        losses = max((result["losses"] for result in ended.results), key=len)
        if losses != whole(runner).losses[: len(losses)]:
            yield f"losses until then {losses}"


def _tracked(checkpoints: Path) -> int:
    """Return the step of the checkpoint that Megatron would load, 0 where there is none."""
    tracker = checkpoints / TRACKER
    text = tracker.read_text() if tracker.exists() else "0"
    if not text.isdigit():
        raise BrokenRun(f"{TRACKER} holds {text!r}")
    return int(text)


def _differences(what: str, run: Trained, losses: tuple[list[float], list[float]]) -> Iterator[str]:
    for name, found, whole_ones in zip(
        ("losses", "evaluations"), (run.losses, run.validation), losses, strict=True
    ):
        if found != whole_ones:
            yield f"{what}: {name} {found} for {whole_ones}"


def miscounted(used: dict[int, list[str]], stock: dict[int, list[str]]) -> Iterator[str]:
    """Yield a problem unless every step used the samples that stock takes for it, each once."""
    wrong = [step + 1 for step in sorted(stock | used) if used.get(step) != stock.get(step)]
    if wrong:
        yield f"steps {wrong} have other samples than stock's"
