"""The demo deletes only what a demo left, and tells a schedule's bubble from waits for a core."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, on_own_cores
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.tiers import first

DEMO = Path(__file__).parents[2] / "scripts/demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(*words: object) -> str:
    run = subprocess.run(
        [sys.executable, str(DEMO), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    return run.stderr


@pytest.mark.parametrize("is_marked", first(1, [False, True]))
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


def slowed(name: str, peak: int) -> RecordedStep:
    """Return a step in which all actions lasted twice as long as a core worked on them."""
    ideal = simulate(catalog.build(name, 4, 8), Costs.per_rank(4, catalog.entry(name).chunks))
    records = (
        RankRecord(
            tuple(Measured(a, start / 10, end / 10, 0, (end - start) / 20) for a, start, end in row), peak, 4
        )
        for row in ideal.events
    )
    return RecordedStep(name, ideal.schedule.placement, tuple(records))


def test_both_times_and_the_peaks_are_printed(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"stock 1F1B": slowed("1f1b", 4 * 2**20), "V-Half": slowed("v-half", 3 * 2**20)}
    replayed = {name: on_own_cores(step).timeline() for name, step in steps.items()}
    ran = {name: step.timeline() for name, step in steps.items()}
    demo.show_steps(steps, {"replay": replayed, "here": ran})
    printed = capsys.readouterr().out
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("│") for line in printed.splitlines())
        if len(cells) == 6
    }
    assert rows["replay"] == ["1.65 s, bubble 27%", "1.32 s, bubble 9%", "0.80"]
    assert rows["here"] == ["3.30 s, bubble 27%", "2.65 s, bubble 9%", "0.80"]
    assert rows["peak activations, rank 3"] == ["4.0 MiB", "3.0 MiB", "0.75"]


def test_the_largest_difference_of_all_losses(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Only some losses are shown; the one that differs is not among them."""
    stock, ours = (demo.Losses({step: 5.0 for step in range(2, 13)}) for _ in range(2))
    stock.validation = ours.validation = 4.0
    ours[3] -= 2e-6
    demo.show_losses({"stock 1F1B": stock, "V-Half": ours})
    printed = capsys.readouterr().out
    assert "Largest difference in 11 steps: 2e-06" in printed
    assert "4.999998" not in printed
    assert printed.count("│ 5.000000   │ 5.000000 │ 0 ") == demo.SHOWN_LOSSES


def test_few_cores_are_named(demo, capsys, monkeypatch):
    monkeypatch.setattr(demo, "cores", lambda: 1)
    demo.show_expectation(11)
    assert "4 ranks on 1 core, so" in capsys.readouterr().out
    monkeypatch.setattr(demo, "cores", lambda: 4)
    demo.show_expectation(11)
    assert "waits" not in capsys.readouterr().out
