"""The demo deletes what a demo left, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts/demo.py"


def refusal(*words: object) -> str:
    run = subprocess.run(
        [sys.executable, str(DEMO), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    return run.stderr


@pytest.mark.parametrize("is_marked", [False, True])
def test_what_no_demo_wrote_stays(tmp_path: Path, is_marked: bool) -> None:
    """A folder of the user's; or text in a folder that a demo wrote to."""
    thesis = tmp_path / "notes" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    if is_marked:
        (tmp_path / ".demo").touch()
    problem = "is in" if is_marked else "has files that no demo wrote; give another folder"
    assert problem in refusal("--text", thesis.parent, "--out", tmp_path)
    assert thesis.read_text() == "precious"


def test_what_a_demo_wrote_is_deleted(tmp_path: Path) -> None:
    for name in (".demo", "old.log"):
        (tmp_path / name).touch()
    assert "does not exist" in refusal("--text", tmp_path.parent / "nowhere", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".demo"]
