"""When a step is recorded and what its trace holds, without a job."""

import errno
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.training import training

from megatron_pp_ext import files
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.megatron.runners.tracing import (
    Counting,
    record_reduction_end,
    record_reduction_start,
    reporting_to,
)
from megatron_pp_ext.megatron.trainer import reports
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import run_record, trace_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import traced
from tests.support.tiers import first
from tests.support.training import train

STOCK = named("1f1b", 2, 4)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The microbatches of the actions in every trace that is written."""
    files: list[list[int]] = []
    monkeypatch.setattr(tracing, "_recorder", None)
    monkeypatch.setattr(tracing, "is_first_pipeline", lambda group: True)
    monkeypatch.setattr(tracing, "reporting_to", lambda recorder, model: nullcontext())
    monkeypatch.setattr(tracing, "aligned", lambda record, group, device: record)
    monkeypatch.setattr(tracing, "gather", lambda record, group: [record])

    def write(path, name, placement, records) -> None:
        files.append([event.action.microbatch for event in records[0].events])

    monkeypatch.setattr(tracing.trace_file, "write", write)
    yield files
    requested.activate(None)


def step(number: int, forward_only: bool = False, **about) -> bool | None:
    """Run one action; whether its bytes are counted, None where it is not recorded."""
    with tracing.recording(None, [], forward_only, **about) as recorder:
        if recorder is None:
            return None
        with recorder.during(Action(0, Kind.F, number)):
            kept = torch.ones(3, requires_grad=True).square()
        is_counted = STORE.meter is not None
        assert bool(recorder.meter.live_bytes) == is_counted
        del kept
        return is_counted


def test_a_trace_holds_the_last_step(written: list[list[int]], tmp_path: Path) -> None:
    """Several updates are written once."""
    requested.activate(requested.Pipeline(STOCK, trace=tmp_path / "trace.json"))
    assert [step(0), step(1), step(2, forward_only=True)] == [True, True, None]
    assert written == [[0], [1]]
    for number in range(5):
        step(number, part=number % 3, parts=3)
    assert written == [[0], [1], [0, 1, 2]]


def test_bytes_are_counted_where_somebody_wants_them(written: list[list[int]], tmp_path: Path) -> None:
    """Counting takes time; a run that compares seconds must not pay for it."""
    requested.activate(requested.Pipeline(STOCK))
    assert step(0) is None
    assert step(0, counting=Counting.BYTES) is True
    assert step(0, counting=Counting.SECONDS) is False
    assert step(0, forward_only=True, counting=Counting.BYTES) is None
    requested.activate(requested.Pipeline(STOCK, trace=tmp_path / "trace.json"))
    assert step(0, counting=Counting.SECONDS) is True
    assert written == [[0]]


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


class Group:
    """A bucket group; its functions are hooked as Megatron's are."""

    def start_grad_sync(self, force_all_reduce: bool = False) -> str:
        return "started"

    def finish_grad_sync(self, force_all_reduce: bool = False) -> str:
        return "finished"

    start_grad_sync = record_reduction_start(start_grad_sync)
    finish_grad_sync = record_reduction_end(finish_grad_sync)


def chunk(dense: int, experts: int) -> SimpleNamespace:
    groups = [Group() for _ in range(dense + experts)]
    return SimpleNamespace(bucket_groups=groups[:dense], expert_parallel_bucket_groups=groups[dense:])


def reduce_all(model: list) -> None:
    groups = [group for one in model for group in (*one.bucket_groups, *one.expert_parallel_bucket_groups)]
    assert {group.start_grad_sync() for group in groups} == {"started"}
    assert {group.finish_grad_sync(force_all_reduce=True) for group in groups} == {"finished"}


def test_reductions_of_all_buckets_have_their_chunk() -> None:
    """Buckets of experts count too, and only within the step that is recorded."""
    model = [chunk(2, 1), chunk(1, 3)]
    recorder = StepRecorder()
    reduce_all(model)
    with reporting_to(recorder, model):
        reduce_all(model)
    reduce_all(model)
    assert [reduction.chunk for reduction in recorder.record.reductions] == [0, 0, 0, 1, 1, 1, 1]
    assert all(reduction.start <= reduction.end for reduction in recorder.record.reductions)
    assert tracing._recorder is None


class Optimizer:
    steps = 0

    def step(self) -> None:
        self.steps += 1


def test_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Losses and norms of every step; the gradients of the first alone, before the optimizer uses them."""
    optimizer, written = Optimizer(), []
    given = SimpleNamespace(verify_pipeline=tmp_path, verify_pipeline_gradients=True)
    monkeypatch.setattr(reports, "get_args", lambda: given)
    monkeypatch.setattr(reports.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        reports, "_write_gradients", lambda folder, model: written.append((folder, optimizer.steps))
    )
    norms = [0.5, None, 0.25]

    def train_step(
        forward_step_func, data_iterator, model, optimizer, scheduler, config, function, iteration
    ):
        optimizer.step()
        losses = {"lm loss": torch.tensor(4.0 - iteration), "mtp loss": torch.tensor(1.0)}
        return losses, 0, False, False, 0, norms[iteration], 7

    step = reports.record_step(train_step)
    for iteration in range(3):
        assert step(None, None, [], optimizer, None, None, None, iteration)[-1] == 7
    assert written == [(tmp_path, 0)] and optimizer.steps == 3
    record = run_record.read(tmp_path, 3)
    assert [dict(losses) for losses in record.losses] == [
        {"lm loss": 4.0 - iteration, "mtp loss": 1.0} for iteration in range(3)
    ]
    assert record.norms == (0.5, None, 0.25)
