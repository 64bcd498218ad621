"""Mutants of the pure-Python rooms, drawn by a seed, and the share of them that the tests of the room notice.

    python -m tests.hunt.mutants.pure_rooms [ROOM...] [--number N] [--seed S] [--loops]

The tests that reach the changed line run, first to last by how long they take, until one fails.
``equivalent.toml`` names the mutants that nobody can notice, each with the reason; they are not counted.
Each room has a section of the page of results.
"""

import argparse
import json
import random
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import table
from tests.hunt.mutants import plugin, report
from tests.hunt.mutants.copies import PACKAGE, ROOT, Copies, copies
from tests.hunt.mutants.mutations import Mutant, count, mutants
from tests.hunt.mutants.symbols import Place, places

ROOMS = ("schedule", "compiler", "costs", "pipedream/partition", "planner")
MORE_TESTS = {
    "costs": ["tests/planner/test_stage_costs.py"],
    "planner": ["tests/cli/test_planner_commands.py"],
}
"""Tests of a room beside those of its own folder."""

LOOP_TESTS = {
    "schedule": ["tests/schedule"],
    "compiler": ["tests/compiler/test_search.py"],
    "planner": ["tests/planner/test_layout.py"],
}
"""The tests of a room's compiled loops: sizes so small that they are quick where nothing is compiled."""

COMPILED_TESTS = {"compiler": ["tests/compiler/test_version.py"]}
"""Tests that decide about what those leave, with loops compiled: a quarter of a minute a mutant."""

SLOW = (
    "--deselect=tests/planner/test_published.py::test_the_98b_grid_search",
    "--deselect=tests/planner/test_published.py::test_megatrons_own_steps",
)
"""Tests of the rooms that are not even tried once here."""

LONGEST = 2.0
"""Seconds of the processor: tests that take longer are left to ``make test``."""

_OPTIONS = ("-p", plugin.__name__)
_COMPILED_SECONDS = 900.0
"""After so many, tests of compiled loops count as failed; they take a tenth of it."""

_IMPORTS_LOOPS = "from megatron_pp_ext.schedule.loops import "


def has_loops(file: str) -> bool:
    """Whether numba compiles functions of ``file``."""
    return _IMPORTS_LOOPS in (ROOT / file).read_text(encoding="utf-8")


def drawn(room: str, number: int, seed: int, loops: bool = False) -> Iterator[Mutant]:
    """Yield ``number`` mutants of ``room``, each as likely as another, with ``loops`` of files with loops."""
    files = sorted(str(path.relative_to(ROOT)) for path in (PACKAGE / room).rglob("*.py"))
    if loops:
        files = list(filter(has_loops, files))
    everywhere = [(file, at) for file in files for at in range(count(ROOT, file))]
    # A seed draws the same place however many are drawn.
    chosen = sorted(random.Random(f"{room} {seed}").sample(everywhere, len(everywhere))[:number])
    for file in dict.fromkeys(file for file, _ in chosen):
        yield from mutants(ROOT, file, [at for other, at in chosen if other == file])


@dataclass(frozen=True)
class Equivalent:
    """A mutant that nobody can notice, and ``why``; ``at`` names its symbol as for planted defects."""

    at: str
    before: str
    after: str
    why: str

    @property
    def places(self) -> list[Place]:
        """Where the symbol is now."""
        return places(PACKAGE, *self.at.split(":"))

    def is_that(self, mutant: Mutant) -> bool:
        """Whether ``mutant`` is the one that is meant."""
        return (mutant.before, mutant.after) == (self.before, self.after) and any(
            place.file == ROOT / mutant.file and place.first <= mutant.line <= place.last
            for place in self.places
        )


def equivalents() -> list[Equivalent]:
    """Return the mutants that ``equivalent.toml`` names."""
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text(encoding="utf-8"))
    return [Equivalent(**entry) for entry in listed["mutant"]]


@dataclass
class Reached:
    """The tests that reach each line of each file, and the seconds of the processor that each takes."""

    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests to run for ``mutant``: for a line that runs at import alone, those of the room."""
        of_file = {int(line): tests for line, tests in self.lines.get(mutant.file, {}).items()}
        # Some lines of a statement over several may have no code of their own.
        line = max((line for line in of_file if line <= mutant.line), default=0)
        found = set(of_file.get(line, ()))
        known = self.seconds if found == {""} else found
        quick = [test for test in known if self.seconds.get(test, LONGEST + 1) <= LONGEST]
        return sorted(quick, key=lambda test: (self.seconds[test], test))


class _Judge:
    """The tests of a room, and what they say of mutants of ``files``."""

    def __init__(self, room: str, copies: Copies, files: set[str]) -> None:
        self.room, self.copies = room, copies
        with_loops = set(filter(has_loops, files))
        if files - with_loops:
            self._plain = self._reached([f"tests/{room}", *MORE_TESTS.get(room, ()), *SLOW])
        if with_loops:
            self._of_loops = self._reached(LOOP_TESTS[room], NUMBA_DISABLE_JIT="1")

    def notices(self, mutant: Mutant) -> bool:
        """Whether a test fails with ``mutant``, or takes far longer than without it."""
        if not has_loops(mutant.file):
            return self._fails(mutant, self._plain)
        compiled = COMPILED_TESTS.get(self.room)
        return self._fails(mutant, self._of_loops, NUMBA_DISABLE_JIT="1") or bool(
            compiled and self._fails_compiled(mutant, compiled)
        )

    def _fails(self, mutant: Mutant, reached: Reached, **environment: str) -> bool:
        tests = reached.tests(mutant)
        seconds = 60 + 20 * sum(reached.seconds[test] for test in tests)
        run = [*_OPTIONS, *tests]
        return bool(tests) and bool(
            self.copies.failure(run, mutant.file, mutant.source, seconds, **environment)
        )

    def _fails_compiled(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """With all loops compiled anew: code that is kept is of the sources."""
        with tempfile.TemporaryDirectory(prefix="loops-") as folder:
            failure = self.copies.failure(
                [*_OPTIONS, *tests], mutant.file, mutant.source, _COMPILED_SECONDS, NUMBA_CACHE_DIR=folder
            )
        return bool(failure)

    def _reached(self, tests: Sequence[str], **environment: str) -> Reached:
        """Run ``tests``, folders or files, once without a mutant; RuntimeError if they fail."""
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            measured = [f"--reached={file.name}", f"--covered={PACKAGE.name}/{self.room}"]
            if problem := self.copies.failure([*_OPTIONS, *measured, *tests], **environment):
                raise RuntimeError(f"the tests fail without a mutant: {' '.join(tests)}; {problem}")
            return Reached(*json.load(file))


def survivors(room: str, number: int, seed: int, loops: bool) -> tuple[Counter[str], list[Mutant]]:
    """Try mutants of ``room`` (``drawn``); return the number of each outcome, and those not noticed."""
    known, counts, left = equivalents(), Counter[str](), []
    tried = []
    for mutant in drawn(room, number, seed, loops):
        if any(one.is_that(mutant) for one in known):
            counts["equivalent"] += 1
        else:
            tried.append(mutant)
    with copies() as made:
        judge = _Judge(room, made, {mutant.file for mutant in tried})
        for mutant, noticed in zip(tried, made.each(judge.notices, tried), strict=True):
            counts["noticed" if noticed else "survived"] += 1
            if not noticed:
                left.append(mutant)
                print(f"{mutant.file}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
    return counts, left


def section(room: str, number: int, seed: int, loops: bool) -> str:
    """Try the room's mutants, and return the text about them."""
    counts, left = survivors(room, number, seed, loops)
    judged = counts["noticed"] + counts["survived"]
    share = f"{counts['noticed'] / judged:.0%}" if judged else "-"
    head = ["drawn", "equivalent", "noticed", "survived", "noticed of those not equivalent"]
    row = [counts.total(), counts["equivalent"], counts["noticed"], counts["survived"], share]
    lines = [f"- `{one.file}`, line {one.line}: `{one.before}` became `{one.after}`" for one in left]
    return "\n\n".join([table(head, [row]), *(["These survived:", "\n".join(lines)] if left else [])])


def main() -> None:
    """Try the rooms that the command line names, or all, and write a section of the page for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], metavar="ROOM")
    parser.add_argument("--number", type=int, default=150, help="mutants a room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loops", action="store_true", help="only files whose functions numba compiles")
    asked = parser.parse_args()
    for room in asked.rooms or (LOOP_TESTS if asked.loops else ROOMS):
        title = f"Compiled loops: {room}" if asked.loops else f"Pure Python: {room}"
        report.write_section(title, section(room, asked.number, asked.seed, asked.loops))


if __name__ == "__main__":
    main()
