"""--pipeline-trace: what ran is what was scheduled, and memory peaks where the simulator says."""

import errno
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from megatron.training import training

from megatron_pp_ext import files
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import traced
from tests.support.tiers import first
from tests.support.training import train

RANKS, MICROBATCHES = 4, 8
PIPELINE = ("--pipeline-model-parallel-size", str(RANKS), "--global-batch-size", str(MICROBATCHES))


@pytest.mark.parametrize(
    ("name", "flags"),
    first(
        2,
        [
            ("v-half", "--pipeline-schedule v-half"),
            ("interleaved", "--num-virtual-stages-per-pipeline-rank 2"),
            ("1f1b", ""),
            ("gpipe", "--pipeline-schedule gpipe"),
        ],
    ),
)
def test_measured_peaks_are_the_simulated_ones(name: str, flags: str) -> None:
    """Stock's own schedulers, too, run the very orders that our families of the same name build."""
    step = traced(RANKS, [*PIPELINE, *flags.split()])
    schedule = catalog.build(name, RANKS, MICROBATCHES)
    assert step.timeline().schedule.orders == schedule.orders
    expected = simulate(schedule, Costs.unit(schedule.placement)).peak_activations
    assert tuple(record.peak_microbatches for record in step.records) == expected


@pytest.mark.parametrize("flag", first(1, ["--pipeline-trace", "--profile-pipeline"]))
def test_a_full_disk_does_not_end_a_run(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "measured.json"
    file.write_text("of an earlier run")
    monkeypatch.setattr(files.os, "replace", fail)
    ranks = train(2, ["--pipeline-model-parallel-size", "2", flag, str(file)])
    assert len(ranks[-1].losses) == 3
    assert file.read_text() == "of an earlier run"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.wide
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_that_vanishes_takes_nothing_else_with_it(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew, or, where something is in its place, rank 0 has a line for the end of the job."""
    folder, said = tmp_path / "traces", tmp_path / "said"
    write = trace_file.write

    def vanish(file: Path, *args: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if is_replaced:
            folder.touch()
        write(file, *args)

    def say(chunks: object) -> None:
        monkeypatch.setattr(trace_file, "write", vanish)
        stock_step = training.training_log

        def log(*args: object, **kwargs: object) -> object:
            with said.open("a") as file, redirect_stdout(file):
                files.say_what_is_missing()  # a forked rank ends without what Python does at its exit
            return stock_step(*args, **kwargs)

        monkeypatch.setattr(training, "training_log", log)

    folder.mkdir()
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "3", "--ckpt-format", "torch_dist"]
    file = folder / "trace.json"
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-trace", str(file), *save]
    ranks = train(2, flags, grab=say)
    assert len(ranks[-1].losses) == 3
    assert (tmp_path / "saved" / "iter_0000003").is_dir()
    assert file.is_file() is not is_replaced
    assert bool(said.read_text()) is is_replaced


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_was_not_written_is_said_at_the_end(comes_back: bool, tmp_path: Path) -> None:
    """The line of the moment is far up in a log; there is none where a later attempt succeeded."""
    file = tmp_path / "gone" / "trace.json"
    script = f"""
import pathlib
from megatron_pp_ext.files import going_on_without
file = pathlib.Path({str(file)!r})
for attempt in range(3):
    with going_on_without(file):
        file.write_text("")
    print("a step", flush=True)
    {comes_back} and file.parent.mkdir(exist_ok=True)
"""
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, *steps, last = job.stdout.splitlines()
    why = f"megatron_pp_ext: {file} %s (No such file or directory)"
    assert first.startswith(why % "cannot be written")
    assert steps[:2] == ["a step", "a step"]
    assert last == ("a step" if comes_back else why % "is missing: it could not be written")
