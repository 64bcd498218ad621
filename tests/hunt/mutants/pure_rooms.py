"""Mutants of the pure-Python rooms, drawn by a seed, and the share of them that the tests of the room notice.

    python -m tests.hunt.mutants.pure_rooms [ROOM...] [--number N] [--seed S] [--loops]

``equivalent.toml`` names the mutants that nobody can notice, each with the reason; they are not counted.
Each room has a section of the page of results.
"""

import argparse
import random
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.report import table
from tests.hunt.mutants import report
from tests.hunt.mutants.mutations import Mutant, count, mutants
from tests.hunt.mutants.noticing import Reached, is_noticed, is_noticed_compiled, reached
from tests.hunt.mutants.symbols import Place, places

ROOT = Path(__file__).parents[3]
PACKAGE = "megatron_pp_ext"
ROOMS = ("schedule", "compiler", "partition", "planner")
MORE_TESTS = {"planner": ["tests/cli/test_planner_commands.py"]}
"""Tests of a room beside those of its own folder."""

LOOP_TESTS = {
    "schedule": ["tests/schedule"],
    "compiler": ["tests/compiler/test_search.py", "tests/compiler/test_event_heap.py"],
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


_IMPORTS_LOOPS = "from megatron_pp_ext.schedule.loops import "


def has_loops(file: str) -> bool:
    """Whether numba compiles functions of ``file``."""
    return _IMPORTS_LOOPS in (ROOT / file).read_text(encoding="utf-8")


def drawn(room: str, number: int, seed: int, loops: bool = False) -> Iterator[Mutant]:
    """Yield ``number`` mutants of ``room``, each as likely as another, with ``loops`` of files with loops."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE / room).rglob("*.py"))
    if loops:
        files = list(filter(has_loops, files))
    everywhere = [(file, at) for file in files for at in range(count(ROOT, file))]
    # A seed draws the same place however many are drawn.
    places = random.Random(f"{room} {seed}").sample(everywhere, len(everywhere))[:number]
    by_file: dict[str, list[int]] = {}
    for file, at in places:
        by_file.setdefault(file, []).append(at)
    for file, chosen in sorted(by_file.items()):
        yield from mutants(ROOT, file, iter(sorted(chosen)))


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
        return places(ROOT / PACKAGE, *self.at.split(":"))

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


class _Judge:
    """The tests of a room, and what they say of a mutant."""

    def __init__(self, room: str) -> None:
        self._room = room

    @cached_property
    def _plain(self) -> Reached:
        tests = [f"tests/{self._room}", *MORE_TESTS.get(self._room, ()), *SLOW]
        return reached(ROOT, f"{PACKAGE}/{self._room}", tests)

    @cached_property
    def _of_loops(self) -> Reached:
        return reached(ROOT, f"{PACKAGE}/{self._room}", LOOP_TESTS[self._room], interpreted=True)

    def notices(self, mutant: Mutant) -> bool:
        """Whether a test fails with ``mutant``."""
        if has_loops(mutant.file):
            compiled = COMPILED_TESTS.get(self._room, ())
            return is_noticed(ROOT, mutant, self._of_loops, interpreted=True) or (
                bool(compiled) and is_noticed_compiled(ROOT, mutant, compiled)
            )
        return is_noticed(ROOT, mutant, self._plain)


def survivors(room: str, number: int, seed: int, loops: bool) -> tuple[Counter[str], list[Mutant]]:
    """Try mutants of ``room`` (``drawn``); return the number of each outcome, and those not noticed."""
    judge = _Judge(room)
    known, counts, left = equivalents(), Counter[str](), []
    for mutant in drawn(room, number, seed, loops):
        if any(one.is_that(mutant) for one in known):
            counts["equivalent"] += 1
        elif judge.notices(mutant):
            counts["noticed"] += 1
        else:
            counts["survived"] += 1
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
