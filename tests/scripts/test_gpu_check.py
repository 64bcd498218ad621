"""scripts/gpu_check.sh: rows are there as soon as they are measured, and no process is left at the end."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

import tests.support.ranks  # noqa: F401  (installs the stand-ins for torch.cuda before Megatron is imported)

# isort: split
from benchmarks.gpu import archive, check, layers, one_rank, parts, prefix, runs, shared_device, sharing
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rows import FAILED, Rows
from megatron_pp_ext.jobs import process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "logs").mkdir()
    return Bench(tmp_path / "logs", dry=True)


@pytest.fixture
def rows(bench: Bench, tmp_path: Path) -> Rows:
    return Rows(tmp_path / "page.md", "Title", "About.", bench, (), lambda: None)


def fail() -> dict[str, object]:
    raise RuntimeError("it is broken")


def test_the_page_has_a_row_as_soon_as_it_is_measured(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.rows.time", SimpleNamespace(monotonic=lambda: 7.0))
    assert "Nothing is measured yet" in rows.page.read_text()
    assert rows.measure("one", lambda: {"ms": 0})
    assert rows.page.read_text().endswith("|  | ms | seconds |\n| --- | --- | --- |\n| one | 0 | 0 |\n")
    assert not rows.measure("two", fail)
    assert rows.measure("three", lambda: {"note": "new"})
    assert rows.page.read_text().splitlines()[-5:] == [
        "|  | ms | note | seconds | failed |",
        "| --- | --- | --- | --- | --- |",
        "| one | 0 |  | 0 |  |",
        "| two |  |  | 0 | it is broken |",
        "| three |  | new | 0 |  |",
    ]
    assert rows.has_failed


def test_rows_that_the_time_does_not_reach_say_so_and_keep_those_before(rows: Rows, bench: Bench) -> None:
    rows.measure("one", lambda: {"ms": 3})
    bench.begin(1)
    rows.measure("two", lambda: pytest.fail("it was started"))
    assert rows.rows["two"][FAILED] == "not run: the 1 s of this part were over"
    assert "| one | 3 |" in rows.page.read_text()


def test_a_run_that_hangs_leaves_half_of_the_time(rows, bench, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.bench.LEAST_SECONDS", 0)
    bench.begin(2)
    rows.measure("hangs", lambda: {"found": bench.run("hangs", ["sleep", "600"])})
    assert rows.rows["hangs"][FAILED] == "not done after 1 s, see hangs.log"


def test_lines_come_when_they_are_printed(bench: Bench) -> None:
    lines = bench.lines("log", ["bash", "-c", "echo one; sleep 600"])
    assert next(lines) == "one"
    lines.close()
    assert [*bench.lines("log", ["printf", "one\\ntwo\\nthree"])] == ["one", "two", "three"]
    with pytest.raises(RuntimeError, match="status 3, see "):
        list(bench.lines("log", ["bash", "-c", "exit 3"]))
    lines = bench.lines("log", ["bash", "-c", "echo one; sleep 600"])
    assert next(lines) == "one"
    bench.begin(0)
    with pytest.raises(RuntimeError, match="not done after 0 s"):
        next(lines)


@pytest.mark.wide
def test_each_test_of_a_gpu_is_a_row(rows: Rows, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are pytest's own, here without a device; what it prints of one that fails is made up."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    parts.tests(bench, rows)
    name = "test_gpu_runtime.py::test_gradients_equal_those_of_one_piece[8-nccl]"
    if not torch.accelerator.is_available():
        assert rows.rows[name] == {"outcome": "skipped (no CUDA device)"}
    assert rows.rows["all"]["outcome"] == "done"

    def lines(name: str, words: Sequence[str]) -> Iterator[str]:
        yield "tests/gpu/test_a.py::test_b[1-x] FAILED                                      [ 50%]"
        raise RuntimeError("status 1, see tests.log")

    monkeypatch.setattr(bench, "lines", lines)
    parts.tests(bench, rows)
    assert rows.rows["test_a.py::test_b[1-x]"][FAILED] == "FAILED"
    assert rows.rows["all"][FAILED] == "status 1, see tests.log"


@pytest.mark.parametrize("name", parts.PROFILED)
def test_gaps_are_those_between_kernels(name: str) -> None:
    found = one_rank.gaps(name, 16, torch.autograd.DeviceType.CPU)
    assert int(str(found["kernels"])) > 500
    longest = [float(gap.split()[0]) for gap in str(found["longest us, before kernel"]).split(", ")]
    assert longest == sorted(longest, reverse=True)
    assert float(str(found["median gap us"])) <= longest[0]


def test_a_cut_backward_is_measured() -> None:
    found = layers.split("plain", 16)
    assert float(str(found["I + W ms"])) > 0


def test_a_layer_in_slices_is_measured() -> None:
    """With attention that keeps all scores; slices are as exact as whole sequences."""
    found = prefix.prefix("16", 128, 2, 8, prefix.masked, "cpu")
    assert float(str(found["in slices ms"])) > 0
    assert found["goal"] == "met"


@pytest.mark.parametrize("name", parts.BESIDE)
def test_work_is_measured_beside_copies(name: str) -> None:
    found = layers.copies(name, 16)
    assert float(str(found["beside copies ms"])) > 0


@pytest.mark.wide
def test_steps_with_activations_on_the_host_are_measured() -> None:
    """It compares gradients, and sees that something moves."""
    found = one_rank.away("v-half", 32, 8)
    assert float(str(found["all away: ms"])) > 0


def test_collectives_that_gloo_lacks_are_made_one_by_one() -> None:
    """A group of one rank: each bucket is reduced by itself, and all are waited for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    tensors = [torch.ones(2), torch.ones(3)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    try:
        works = shared_device.one_by_one(group, tensors, options)
        works.wait()
    finally:
        dist.destroy_process_group()
    assert len(works.works) == len(tensors)
    assert [tensor.sum().item() for tensor in tensors] == [2, 3]


def test_the_archive_holds_the_end_of_every_log_and_stays_small(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "mps").mkdir(parents=True)
    os.mkfifo(logs / "mps/control")
    noise = os.urandom(archive.LARGEST)
    for name in ("a.log", "mps/b.log"):
        (logs / name).write_bytes(noise + name.encode())
    (logs / "c.log").write_text("short")
    archive.pack(logs, tmp_path / "logs.tar.gz")
    assert (tmp_path / "logs.tar.gz").stat().st_size <= archive.LARGEST
    archive.unpack(tmp_path / "logs.tar.gz", tmp_path / "again")
    assert (tmp_path / "again/a.log").read_bytes().endswith(b"a.log")
    assert (tmp_path / "again/mps/b.log").stat().st_size > archive.LARGEST // 4
    assert (tmp_path / "again/c.log").read_text() == "short"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fly"], "there is no part 'fly': take doctor, tests, split"),
        (["parity:1f1b,v-max"], "parity has no row '1f1b': take v-half, zb-h1, v-min, v-zb"),
        (["rehearse:v-max"], "rehearse has no row 'v-max': take 1f1b, "),
        (["tests:a"], "tests has no row 'a': its rows cannot be chosen"),
    ],
)
def test_unknown_words(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        check.chosen(words)


def test_every_part_is_done_in_less_than_five_minutes() -> None:
    """A process that does not end when it is asked to is killed later than that."""
    assert all(part.seconds + process.GRACE_SECONDS <= 290 for part in parts.PARTS.values())
    assert check.chosen(["rehearse:v-zb,flex", "split"]) == {"rehearse": ("v-zb", "flex"), "split": ()}


MADE_UP = """
import json, sys
from benchmarks.gpu import check, parts
from benchmarks.gpu.bench import Bench

def two(bench, rows):
    rows.measure("one", lambda: {"found": "this"})
    hangs = "setsid sleep 600 & echo started; touch STARTED; wait"
    rows.measure("two", lambda: {"found": bench.run("two", ["bash", "-c", hangs])})
    rows.measure("three", lambda: {"found": "that"})

def fails(bench, rows):
    rows.measure("one", lambda: {"failed": "it differs"})

Bench.module = lambda *words: {"cuda": True, "line": "made up", "nccl": []}
check.PARTS |= {"two": parts.Part("Two", 60, two), "fails": parts.Part("Fails", 60, fails)}
check.typer.run(check.main)
"""


def made_up(folder: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        MADE_UP.replace("STARTED", str(folder / "started")),
        "--out",
        str(folder),
        *words,
    ]


def wait_for(file: Path, running: subprocess.Popen) -> None:
    while not file.exists():
        assert running.poll() is None
        time.sleep(0.02)


def stop(running: subprocess.Popen, mark: str) -> None:
    """Send SIGTERM as a batch system does, and see that all ends that carries the mark."""
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=100) == check.STOPPED
    assert not list(process._marked(mark))


def test_a_stop_in_the_middle_leaves_a_table_an_archive_and_no_process(tmp_path: Path) -> None:
    """Also none that has a session of its own."""
    own = {**os.environ, process.MARKS: str(tmp_path)}
    running = subprocess.Popen(made_up(tmp_path, "two"), env=own, cwd=ROOT)
    wait_for(tmp_path / "started", running)
    assert len(list(process._marked(str(tmp_path)))) >= 3
    stop(running, str(tmp_path))
    table = (tmp_path / "two.md").read_text()
    assert "| one | this |" in table
    assert "stopped from outside" in table
    with tarfile.open(tmp_path / "logs.tar.gz") as tar:
        log = tar.extractfile("two.log")
        assert log is not None and log.read() == b"started\n"
    assert {file.name for file in tmp_path.iterdir()} == {"two.md", "logs.tar.gz", "started"}


def test_a_row_that_fails_decides_the_exit_status(tmp_path: Path) -> None:
    done = subprocess.run(made_up(tmp_path, "fails"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rows failed in fails: " in done.stderr
    assert re.search(r"\| one \| \d+ \| it differs \|", done.stdout)


def test_without_a_device_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"cuda": False, "line": "", "nccl": []}
    monkeypatch.setattr(Bench, "module", lambda *words: answer)
    with pytest.raises(SystemExit, match=r"^torch sees no CUDA device here: .* or add --dry$"):
        check.main(["split"], tmp_path, None, False)
    monkeypatch.setattr(Bench, "module", lambda *words: fail())
    with pytest.raises(SystemExit, match=r"^this machine cannot be examined: it is broken$"):
        check.main(["split"], tmp_path, None, False)


CONTROL = """#!/bin/bash
echo "$CUDA_MPS_PIPE_DIRECTORY" > RAN
exec sleep 600
"""


@pytest.mark.parametrize(
    ("nccl", "works", "tried", "backend"),
    [
        ((2, 28, 9), "", [], "gloo"),
        ((2, 29, 7), "", [], "gloo"),
        ((2, 30, 3), "sharing-mps", ["sharing-mps"], "nccl"),
        ((2, 30, 7), "sharing", ["sharing-mps", "sharing"], "nccl"),
        ((2, 31, 2), "", ["sharing-mps", "sharing"], "gloo"),
    ],
)
def test_ranks_share_a_device_as_nccl_lets_them(nccl, works, tried, backend, bench, tmp_path, monkeypatch):
    """The service that lets their kernels run at once is a stand-in, and ends with the context."""
    control, ran = tmp_path / sharing.CONTROL, tmp_path / "ran"
    control.write_text(CONTROL.replace("RAN", str(ran)))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(process.MARKS, str(tmp_path))
    found = []

    def run(name: str, words: Sequence[str], environment: object = None) -> str:
        if name == "sharing-mps":
            while not ran.exists():
                time.sleep(0.01)
        found.append(name)
        return "" if name == works else str(fail())

    monkeypatch.setattr(bench, "run", run)
    bench.nccl = nccl
    with sharing.shared_device(bench):
        assert (found, bench.backend) == (tried, backend)
        assert ("CUDA_MPS_PIPE_DIRECTORY" in bench.environment) is (works == "sharing-mps")
        assert (bench.environment.get("NCCL_NVLS_ENABLE") == "0") is (backend == "nccl")
    assert bench.backend == "gloo" and not bench.environment
    assert not list(process._marked(str(tmp_path)))


def launched(mark: str) -> int:
    """How many processes torchrun and its ranks are by now."""
    number = 0
    for one in process._marked(mark):
        with suppress(psutil.Error):  # it has ended in between
            number += "benchmarks.gpu.shared_device" in one.cmdline()
    return number


@pytest.mark.wide
def test_a_dry_run_of_every_part_and_a_stop_among_ranks(tmp_path: Path) -> None:
    """On CPUs that stand in for a GPU, with tiny models."""
    words = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--dry", "--seconds", "2000", "--out", str(tmp_path)]
    own = {**os.environ, "PYTHON": sys.executable, process.MARKS: str(tmp_path)}
    chosen = ["doctor", "tests", "split", "gaps:v-half", "parity:v-half", "rehearse:v-half"]
    chosen += [
        "away:v-half",
        "away-one-queue:v-min",
        "offload:v-half-half",
        "cp:zb-h1",
        "ep:zb-h1",
        "ddp:v-half",
    ]
    subprocess.run([*words, *chosen], env=own, check=True)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"{part.partition(':')[0]}.md" for part in chosen} | {"logs.tar.gz"}
    assert "| v-half | 6." in (tmp_path / "parity.md").read_text()
    assert not list(process._marked(str(tmp_path)))

    running = subprocess.Popen([*words, "parity"], env=own)
    while launched(str(tmp_path)) < 1 + runs.RANKS_OF_PARITY:
        assert running.poll() is None
        time.sleep(0.1)
    stop(running, str(tmp_path))
    assert "stopped from outside" in (tmp_path / "parity.md").read_text()
    with tarfile.open(tmp_path / "logs.tar.gz") as tar:
        assert {"split-plain.log", "parity-checkpoint.log"} <= set(tar.getnames())
