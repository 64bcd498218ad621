"""The list of planted defects fits the source: each can be planted, and the tests that it names are there."""

import ast
import re
from pathlib import Path

import pytest

from tests.hunt.mutants import defects, report
from tests.hunt.mutants.copies import ROOT
from tests.hunt.mutants.defects import Defect
from tests.hunt.mutants.symbols import places


def fits(defect: Defect) -> None:
    ast.parse(defect.applied((ROOT / defect.path).read_text(encoding="utf-8")))
    assert defect.before != defect.after, defect
    assert defect.user.endswith("."), defect
    assert len(set(defect.located_tests)) == len(defect.tests) > 0, defect


def test_each_can_be_planted_and_the_tests_that_have_to_notice_are_there() -> None:
    problems = []
    for defect in defects.all_defects():
        try:
            fits(defect)
        except (ValueError, SyntaxError, AssertionError) as problem:
            problems.append(f"{defect.user} {problem}")
    assert not problems, "\n".join(problems)


SOURCE = """
LIMIT = 3

class Size:
    unit = 1

    @property
    def half(self):
        whole = 4
        return whole // 2

def double(size):
    def twice():
        return size * 2
    return twice()
"""


def test_a_symbol_is_found_in_its_module_and_wherever_it_has_moved(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    moved = tmp_path / "room" / "moved.py"
    moved.write_text(SOURCE)
    (tmp_path / "other.py").write_text("LIMIT = 4\n")

    def lines(module: str, name: str) -> list[str]:
        return [place.text for place in places(tmp_path, module, name)]

    assert lines("room.moved", "LIMIT") == ["LIMIT = 3\n"]
    assert lines("other", "LIMIT") == ["LIMIT = 4\n"]
    assert lines("gone", "LIMIT") == ["LIMIT = 4\n", "LIMIT = 3\n"]
    assert lines("gone", "Size.unit") == ["    unit = 1\n"]
    assert lines("gone", "double.twice") == ["    def twice():\n        return size * 2\n"]
    (half,) = lines("gone", "Size.half")
    assert half.startswith("    @property") and half.endswith("whole // 2\n")
    assert lines("gone", "Size.half.whole") == []
    assert "".join(places(tmp_path, "gone", "Size.half")[0].parts(SOURCE)) == SOURCE


def test_a_place_that_has_changed_is_named() -> None:
    with pytest.raises(ValueError, match=r"runtime.split:no_such: 0 places have the name"):
        Defect("runtime.split:no_such", "line", "", "Nothing.", ()).applied("some source")
    with pytest.raises(ValueError, match=r"no_such.*: 0 files of tests"):
        _ = Defect("", "", "", "", ("tests/runtime/test_split.py::test_no_such",)).located_tests


def test_a_section_of_the_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for title, text in (("One", "first"), ("Two", "second\n\n### Rooms\n\nthird"), ("One", "fourth")):
        report.write_section(title, text, page)
    written = page.read_text()
    assert written.startswith("# Tests that notice\n")
    assert re.findall(r"^## (.*)$", written, re.MULTILINE) == ["One", "Two"]
    assert "\nfirst\n" not in written  # its command names the tests that ran
    assert written.index("fourth") < written.index("second") < written.index("third")
