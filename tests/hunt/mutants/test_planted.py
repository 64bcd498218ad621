"""The list of planted defects fits the source: each can be planted, and the tests that it names are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.hunt.mutants import defects, report
from tests.hunt.mutants.defects import ROOT, Defect

ALL = defects.all_defects()


def by_place(defect: Defect) -> str:
    return f"{defect.file}: {' '.join(defect.before.split())[:60]}"


@pytest.mark.parametrize("defect", ALL, ids=by_place)
def test_it_can_be_planted(defect: Defect) -> None:
    changed = defect.applied((ROOT / defect.path).read_text(encoding="utf-8"))
    ast.parse(changed)
    assert defect.user.endswith(".")
    assert len({name for name in defect.tests}) == len(defect.tests) > 0


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted({test for defect in ALL for test in defect.tests}))
def test_the_test_that_has_to_notice_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.sub(r"\[.*", "", function) in functions_of(path)


def test_a_place_that_has_changed_is_named() -> None:
    defect = Defect("runtime/split.py", "no such line", "", "Nothing.", ())
    with pytest.raises(ValueError, match=r"megatron_pp_ext/runtime/split.py has .* 0 times"):
        defect.applied("some source")


def test_a_section_of_the_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for title, text in (("One", "first"), ("Two", "second\n\n### Rooms\n\nthird"), ("One", "fourth")):
        report.write_section(title, text, page)
    written = page.read_text()
    assert written.startswith("# Tests that notice\n")
    assert re.findall(r"^## (.*)$", written, re.MULTILINE) == ["One", "Two"]
    assert "first" not in written
    assert written.index("fourth") < written.index("second") < written.index("third")
