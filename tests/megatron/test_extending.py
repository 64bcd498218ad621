"""The worked examples of docs/extending.md: each adds its part in the one or two files that it names."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
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

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "extending.md"
NAME = "gpipe-wave"


def examples(section: str) -> list[str]:
    """The Python and the rows of tables in a section of the document."""
    _, _, text = DOCUMENT.read_text().partition(f"## {section}\n")
    return re.findall(r"```(?:python|toml)\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> catalog.Entry:
    """The document's entry in the catalogue, until the test ends."""
    file, entry = examples("A new schedule")[:2]
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


@pytest.fixture
def own_copy(tmp_path: Path) -> Path:
    """A copy of the package, to change; with its bytecode, which serves what is not changed."""
    shutil.copytree(ROOT / "megatron_pp_ext", tmp_path / "megatron_pp_ext")
    return tmp_path / "megatron_pp_ext"


def insert(file: Path, before: str, lines: str) -> None:
    """Write ``lines`` in front of the one place that has ``before``, as far indented as that."""
    source = file.read_text()
    assert source.count(before) == 1
    indent = " " * (len(before) - len(before.lstrip()))
    file.write_text(source.replace(before, textwrap.indent(lines, indent) + before))


def mpp(package: Path, words: str) -> str:
    """What that package's ``mpp estimate`` says."""
    model = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 64"
    estimate = [sys.executable, "-m", "megatron_pp_ext.cli", "estimate", "--no-ask", "--"]
    command = [*estimate, *model.split(), *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "COLUMNS": "500"}
    done = subprocess.run(
        command, cwd=package.parent, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_a_flag_is_declared_once_and_read_once(own_copy: Path) -> None:
    declared, read = examples("A new flag")
    insert(own_copy / "job" / "our_flags.toml", "[--pipeline-trace]\n", declared)
    insert(own_copy / "job" / "pipeline.py", "    if job.pipeline.pipeline_schedule is None:", read)
    job = (
        "--pipeline-model-parallel-size 4 --pipeline-schedule 1f1b --global-batch-size 8 --micro-batch-size 1"
    )
    said = mpp(own_copy, f"{job} --pipeline-most-microbatches 7")
    assert "a step has 8 microbatches, which is more than --pipeline-most-microbatches 7" in said
    assert "microbatches, which" not in mpp(own_copy, f"{job} --pipeline-most-microbatches 8")
    assert "did you mean '--pipeline-most-microbatches'" in mpp(
        own_copy, f"{job} --pipeline-most-microbatch 8"
    )


def test_a_refusal_is_one_row(own_copy: Path) -> None:
    row = 'Rule("--swiglu", "the example is for plain layers", "leave it out"),\n'
    insert(own_copy / "job" / "rules" / "schedules.py", '            Rule("--use-megatron-fsdp"', row)
    job = "--pipeline-model-parallel-size 4 --global-batch-size 8 --micro-batch-size 1 --swiglu"
    said = mpp(own_copy, f"{job} --pipeline-schedule 1f1b")
    assert (
        "--pipeline-schedule 1f1b does not support --swiglu: the example is for plain layers; leave it out"
        in said
    )
    assert "does not support" not in mpp(own_copy, job)
