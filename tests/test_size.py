"""The house grows only where a commit says so."""

import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CEILINGS = tomllib.loads((TESTS / "size.toml").read_text())


@pytest.mark.parametrize(
    ("name", "folder"), [("package", TESTS.parent / "megatron_pp_ext"), ("tests", TESTS)]
)
def test_lines_stay_below_their_ceiling(name: str, folder: Path) -> None:
    lines = sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))
    assert lines <= CEILINGS[name], (
        f"{folder.name}/ has {lines} lines of Python, {lines - CEILINGS[name]} more than {name} = "
        f"{CEILINGS[name]} in tests/size.toml: remove as many, or raise the number and say why in the commit"
    )
