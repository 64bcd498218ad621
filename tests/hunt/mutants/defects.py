"""Defects that are planted by hand, one at a time, in a copy of the project; named tests have to notice.

    python -m tests.hunt.mutants.defects [WORD...]

Each file in ``planted`` lists the defects of one room.  With words, only those defects are planted whose
file, symbol or change has one of them, and nothing is written to the page of results.
"""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.report import table
from tests.hunt.mutants import report
from tests.hunt.mutants.copies import PACKAGE, ROOT, copies
from tests.hunt.mutants.symbols import Place, places

PLANTED = Path(__file__).parent / "planted"


@dataclass(frozen=True)
class Defect:
    """One place of the package, what is planted there, and who has to notice.

    ``at`` is a module and the symbol in it that has ``before`` exactly once, or that is elsewhere by now.
    ``user`` says what somebody would see who trained with it.  ``equivalent`` is the reason why nobody can
    notice, for a change that looked like a defect; ``tests`` are then those nearest to it, and pass.
    """

    at: str
    before: str
    after: str
    user: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @cached_property
    def place(self) -> Place:
        """The place of the package; ValueError unless there is one place that has ``before`` once."""
        found = places(PACKAGE, *self.at.split(":"))
        fitting = [place for place in found if place.text.count(self.before) == 1]
        if len(fitting) != 1:
            raise ValueError(
                f"{self.at}: {len(found)} places have the name, and {len(fitting)} of these have once "
                f"what is replaced: {self.before!r}"
            )
        return fitting[0]

    @property
    def located_tests(self) -> list[str]:
        """``tests`` in the files that have them now; ValueError unless each function is found once."""
        return [_located(test) for test in self.tests]

    @property
    def path(self) -> str:
        """The file from the project's folder on."""
        return str(self.place.file.relative_to(ROOT))

    @property
    def room(self) -> str:
        """The room of the package."""
        return self.path.split("/")[1]

    def applied(self, source: str) -> str:
        """Return ``source``, the text of the file, with the defect."""
        before, text, behind = self.place.parts(source)
        return before + text.replace(self.before, self.after) + behind


def _located(test: str) -> str:
    path, _, name = test.partition("::")
    module = path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    files = {place.file for place in places(ROOT / "tests", module, name.partition("[")[0])}
    if len(files) != 1:
        raise ValueError(f"{test}: {len(files)} files of tests have that function")
    return f"{files.pop().relative_to(ROOT)}::{name}"


def all_defects() -> list[Defect]:
    """Return the defects of all rooms."""
    return [
        Defect(**{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(PLANTED.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["defect"]
    ]


def noticed(defects: Sequence[Defect]) -> Iterator[tuple[Defect, bool]]:
    """Plant each of ``defects`` by itself and yield it with whether its tests fail, in the order of the list.

    ValueError if a test fails without any defect.
    """
    with copies() as made:
        tests = list(dict.fromkeys(test for defect in defects for test in defect.located_tests))
        if problem := made.failure(tests):
            raise ValueError(f"tests of the list fail without a defect; mend them first; {problem}")

        def is_noticed(defect: Defect) -> bool:
            source = (ROOT / defect.path).read_text(encoding="utf-8")
            return bool(made.failure(defect.located_tests, defect.path, defect.applied(source)))

        yield from zip(defects, made.each(is_noticed, defects), strict=True)


def main(words: Sequence[str]) -> int:
    """Plant the defects that ``words`` choose, all without words; return 1 if one was not noticed."""
    chosen = [
        defect
        for defect in all_defects()
        if not words
        or any(word in f"{defect.path} {defect.at} {defect.before} {defect.after}" for word in words)
    ]
    if not chosen:
        print(f"no planted defect has {' or '.join(words)} in its file, symbol or change", file=sys.stderr)
        return 1
    score: dict[str, list[bool]] = {}
    missed: list[Defect] = []
    for defect, was_noticed in noticed(chosen):
        as_expected = was_noticed is not bool(defect.equivalent)
        said = "noticed" if was_noticed else "equivalent" if defect.equivalent else "MISSED"
        print(f"{said:10} {defect.path}: {defect.user}", flush=True)
        if not defect.equivalent:
            score.setdefault(defect.room, []).append(was_noticed)
        if not as_expected:
            missed.append(defect)
    if not words:
        report.write_section("Planted defects", _section(chosen, score, missed))
    return bool(missed)


def _section(chosen: Sequence[Defect], score: dict[str, list[bool]], missed: Sequence[Defect]) -> str:
    rows = [(room, len(found), sum(found), f"{sum(found) / len(found):.0%}") for room, found in score.items()]
    everything = [one for found in score.values() for one in found]
    rows.append(("all", len(everything), sum(everything), f"{sum(everything) / len(everything):.0%}"))
    parts = [table(("room", "planted", "noticed", "score"), rows)]
    parts += [f"Missed: `{defect.path}`: {defect.user}" for defect in missed]
    equivalent = [defect for defect in chosen if defect.equivalent]
    if equivalent:
        parts.append("These changes are equivalent, and are not counted:")
        parts.append("\n".join(f"- `{one.path}`: {one.user} {one.equivalent}" for one in equivalent))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
