"""Tries a drawn case: runs it and stock, and says what came of it.

A run that is further from stock than the documents allow may have been moved by rounding alone.  So it is
tried more closely, unless the first step already differs, where no update has amplified anything:

- A job in half precision runs again in fp32, where it has to equal stock within fp32's tolerances.
- Then no difference in half precision may exceed four times that of stock from itself with ``noise``.

The first finds what is wrong in any precision, however noisy half precision is; the second what is wrong in
half precision alone.  Neither can fail by chance where stock is as sensitive as the job under the schedule.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_pp_ext.features.offload import megatron
from megatron_pp_ext.verification.verdict import Arithmetic
from tests.hunt.fuzz import job, judge, samples, stores
from tests.hunt.fuzz.factors import Row, is_legal
from tests.hunt.fuzz.noise import BOUNDLESS, DRAWS, SILENCE, LastBits, Noise, between
from tests.support.comparison import Result, run
from tests.support.ranks import RankError
from tests.support.told_documents import told


class Kind(StrEnum):
    """What can come of a case."""

    EQUAL = "equal to stock"
    NOISE = "as far from stock as noise moves stock"
    REFUSED = "refused by a rule that the documents state"
    DIFFERENT = "different"
    FAILED = "failed"
    HUNG = "hung"
    STOCK_FAILED = "stock failed"

    @property
    def is_finding(self) -> bool:
        """Whether somebody has to look at it.  The hunt should never draw what stock cannot run."""
        return self not in (Kind.EQUAL, Kind.NOISE, Kind.REFUSED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case, in lines; ``seconds`` are those of its runs, with stock's if that had to run."""

    kind: Kind
    lines: tuple[str, ...] = ()
    seconds: float = 0.0

    def is_like(self, other: "Outcome") -> bool:
        """Whether the two are the same finding, as far as one can tell: errors of one type."""
        return self.kind is other.kind and self._error() == other._error()

    def _error(self) -> str:
        raises = self.kind in (Kind.FAILED, Kind.STOCK_FAILED)
        return self.lines[-1].partition(":")[0] if raises and self.lines else ""


REFUSALS = (
    r"memory limit .* is infeasible",  # docs/schedules.md, "flex": a rank must keep at least one microbatch
    r"memory limit .* has no room for the parts of a shared vocabulary",  # the same rule, in the same place
    r"put microbatch 0 first, or add --transformer-impl local",  # docs/compatibility.md: such a csv:FILE
)
"""The refusals that a drawn case may meet, each with where the documents state it."""

_KEPT = 4
"""How many runs of stock are kept, for neighbours."""

_LINE = 300
"""How much of a line is shown."""

_REFUSED = re.compile(r"SystemExit: megatron_pp_ext: (.*)")


class _StockFailed(Exception):
    pass


class _Runs(NamedTuple):
    """Ours, stock's and what is ``allowed`` between them; ``resumed`` goes on from our checkpoint, if any."""

    allowed: Arithmetic
    ours: Result
    theirs: Result
    resumed: Result | None


class Trials:
    """Tries cases one after the other, with data in a folder of its own, and keeps stock's last runs."""

    def __init__(self, folder: Path, train: Callable[..., Result] = run) -> None:
        self._folder = folder
        self._train = train
        self._stock_of = lru_cache(_KEPT)(self._run_stock)
        samples.write(folder)
        megatron.SMALLEST = 1  # small models, too, have something that leaves the device

    def __call__(self, row: Row) -> Outcome:
        """Run the case; whatever goes wrong is in the outcome."""
        start = time.monotonic()
        try:
            kind, lines = self._compared(row)
        except _StockFailed as error:
            kind, lines = Kind.STOCK_FAILED, _last_lines(str(error))
        except RankError as error:
            kind, lines = _failure(str(error))
        except AssertionError as error:
            # Ranks that should have the same number do not.
            kind, lines = Kind.DIFFERENT, _last_lines(f"ranks disagree: {error}")
        return Outcome(kind, lines, time.monotonic() - start)

    def _compared(self, row: Row) -> tuple[Kind, tuple[str, ...]]:
        runs = self._runs(row)
        lines = tuple(_differences(row, runs))
        if not lines:
            return Kind.EQUAL, ()
        if not any(_differences(row, runs, BOUNDLESS)):
            in_fp32 = {**row, "precision": "fp32"}
            if in_fp32 != row and is_legal(in_fp32) and row["graphs"] == "none":
                kind, found = self._compared(in_fp32)
                if kind is Kind.DIFFERENT:
                    return kind, (*lines, *(f"in fp32 too, {line}" for line in found))
            noise = self._noise(row, runs)
            if not (left := tuple(_differences(row, runs, noise))):
                return Kind.NOISE, lines
            lines = left
        return Kind.DIFFERENT, lines

    def _runs(self, row: Row) -> _Runs:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder, ranks = Path(name), job.ranks(row)
            theirs = self._stock_of(ranks, row["checkpoint"], *job.stock(row, self._folder))
            flags = job.trained(row, self._folder, folder)
            other_order = job.CSV_ANY_ORDER in (row["schedule"].split()[0], row["resume"].split()[0])
            allowed = judge.arithmetic(flags, ranks, other_order)
            with told() if row["documents"] == "told" else nullcontext():
                ours = self._train(
                    ranks, [*flags, *job.saving(row["checkpoint"], folder)], **stores.options(row)
                )
            resumed = self._resumed(row, folder) if job.has_checkpoint(row) else None
        return _Runs(allowed, ours, theirs, resumed)

    def _resumed(self, row: Row, folder: Path) -> Result:
        failure = None
        try:
            return self._train(job.ranks(row), job.resumed(row, self._folder, folder))
        except RankError as error:
            failure = error
        # No longer handled here: ranks that stock forks would tell it with their own errors.
        self._resume_stock(row)
        raise failure

    def _noise(self, row: Row, runs: _Runs) -> Noise:
        """How far noise of one last bit of the job's precision moves stock."""
        flags = job.stock(row, self._folder)
        bits = (LastBits(runs.allowed.precision, draw) for draw in range(DRAWS))
        return between(runs.theirs, [self._train(job.ranks(row), flags, disturb=bit) for bit in bits])

    def _resume_stock(self, row: Row) -> None:
        """Raise _StockFailed where stock itself cannot go on from its own checkpoint of the job."""
        alone = {**row, "resume": job.STOCK}
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            try:
                self._train(
                    job.ranks(row), [*job.stock(row, self._folder), *job.saving(row["checkpoint"], folder)]
                )
                self._train(job.ranks(row), job.resumed(alone, self._folder, folder))
            except AssertionError as error:
                raise _StockFailed(str(error)) from error

    def _run_stock(self, ranks: int, checkpoint: str, *flags: str) -> Result:
        """Stock's run, which saves as well: what Megatron cannot save, nobody can resume."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            try:
                return self._train(ranks, [*flags, *job.saving(checkpoint, Path(folder))])
            except AssertionError as error:
                raise _StockFailed(str(error)) from error


def _differences(row: Row, runs: _Runs, noise: Noise = SILENCE) -> Iterator[str]:
    """Yield a line for every number that is further from stock's than is allowed beside ``noise``."""
    yield from judge.differences(runs.ours, runs.theirs, runs.allowed, noise)
    if runs.resumed:
        later = judge.later_differences(runs.resumed, runs.theirs, runs.allowed, job.SAVED_AFTER, noise)
        for line in later:
            yield f"resumed under {row['resume']}, {line}"


def _failure(text: str) -> tuple[Kind, tuple[str, ...]]:
    refused = _REFUSED.search(text)
    if refused and any(re.search(known, refused[1]) for known in REFUSALS):
        return Kind.REFUSED, (refused[1],)
    hung = re.match(r"ranks .* did not finish", text)
    return (Kind.HUNG if hung else Kind.FAILED), _last_lines(text)


def _last_lines(text: str) -> tuple[str, ...]:
    """The last lines of the first rank that failed, which say what it raised and where."""
    first = text.split("\n--- rank ")[:2][-1]
    return tuple(line[:_LINE] for line in first.splitlines() if line.strip())[-6:]
