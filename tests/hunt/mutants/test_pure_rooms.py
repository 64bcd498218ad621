"""The tool that changes the pure-Python rooms: what it changes, what it runs, and its list of exceptions."""

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutants are made by mutmut: install the dev extra")

from tests.hunt.mutants.mutations import count, mutants
from tests.hunt.mutants.pure_rooms import Reached, equivalents

SOURCE = '''"""Text."""

LIMIT = 3


class Size:
    @property
    def half(self) -> "int | None":
        """Text."""
        return len("text") // 2 if LIMIT > 4 else None
'''


def test_changes_are_single_and_leave_texts_alone(tmp_path: Path) -> None:
    (tmp_path / "size.py").write_text(SOURCE)
    found = mutants(tmp_path, "size.py")
    assert len(found) == count(tmp_path, "size.py")
    assert ("LIMIT = 3", "LIMIT = 4") in {(one.before, one.after) for one in found}
    assert {one.line for one in found} == {3, 10}
    after = [one.after for one in found if one.line == 10]
    assert 'return len("text") // 2 if LIMIT >= 4 else None' in after
    assert 'return len("text") // 3 if LIMIT > 4 else None' in after
    assert all('"text"' in one or "None" in one for one in after)
    for one in found:
        compile(one.source, "size.py", "exec")
    (chosen,) = mutants(tmp_path, "size.py", [1])
    assert chosen == found[1]


def test_the_tests_that_reach_a_line_run_shortest_first(tmp_path: Path) -> None:
    (tmp_path / "size.py").write_text(SOURCE)
    table, *_, inside = mutants(tmp_path, "size.py")
    seconds = {"slow": 1.5, "quick": 0.1, "other": 0.5, "long": 3.0}
    reached = Reached({"size.py": {"3": [""], "9": ["", "slow", "quick", "long"]}}, seconds)
    assert reached.tests(table) == ["quick", "other", "slow"]
    assert reached.tests(inside) == ["quick", "slow"]


def test_what_cannot_be_noticed_is_still_in_the_source() -> None:
    for one in equivalents():
        lines = [" ".join(line.strip() for line in place.text.splitlines()) for place in one.places]
        assert any(one.before in text for text in lines), f"equivalent.toml: {one.at} has no {one.before!r}"
        assert one.before != one.after
        assert one.why.endswith(".")
