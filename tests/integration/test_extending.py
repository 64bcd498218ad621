"""The worked example of docs/extending.md is registered, checked, looked at and trained with."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from megatron_pp_ext.cli import app
from megatron_pp_ext.compiler.search.proposals import published
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import wave
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import assert_same_bits, run, stock

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
NAME = "gpipe-wave"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> catalog.Entry:
    """The document's entry in the catalogue, until the test ends."""
    file, entry = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[:2]
    family = ModuleType("gpipe_wave")
    exec(file, vars(family))
    (made,) = eval(f"({entry})", {**vars(catalog), "gpipe_wave": family})
    monkeypatch.setattr(catalog, "ENTRIES", dict(catalog.ENTRIES))
    monkeypatch.setattr(catalog, "NAMES", catalog.NAMES)
    catalog.register(made)
    return made


def test_the_example_is_a_schedule_and_keeps_its_promise(registered: catalog.Entry) -> None:
    for p in (2, 3, 4, 5, 8):
        for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1):
            schedule = catalog.build(NAME, p, m)
            check(schedule)
            assert schedule.placement == registered.placement(p) == wave(p, 4)
            timeline = simulate(schedule, Costs.unit(schedule.placement))
            assert timeline.makespan == registered.promise.makespan(p, m)
            assert max(timeline.peak_activations) == registered.promise.peak(p, m)


def test_the_example_is_known_to_commands_and_compiler(registered: catalog.Entry) -> None:
    assert NAME in CliRunner().invoke(app, ["list"]).output
    shown = CliRunner().invoke(app, ["schedule", NAME, "-p", "2", "-m", "3"])
    assert shown.exit_code == 0, shown.output
    assert "makespan 12\n" in shown.output
    assert [schedule.name for schedule in published(wave(3, 4), 5)] == [NAME]


def test_the_example_trains_as_stock(registered: catalog.Entry) -> None:
    """Eight layers, one in each of two ranks' four stages: losses and gradients bit for bit."""
    flags = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    ours = run(2, [*flags, "--pipeline-schedule", NAME])
    assert_same_bits(ours, stock(2, *flags))
