"""Processes of training runs end with their children, whatever ends the context that they were started in."""

import os
import sys
import time
from pathlib import Path

import pytest

from megatron_pp_ext.jobs import command, process


def ended(pid: int) -> bool:
    """Whether a process is gone; its parent is, so that it does not stay as a zombie of ours for long."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def wait_for(file: Path) -> int:
    while not (file.exists() and file.read_text().strip()):
        time.sleep(0.02)
    return int(file.read_text())


def test_an_error_ends_a_process_and_its_child(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; wait"
    with (
        pytest.raises(KeyboardInterrupt),
        (tmp_path / "log").open("wb") as log,
        process.started(["bash", "-c", script], log),
    ):
        wait_for(child)
        raise KeyboardInterrupt
    assert ended(wait_for(child))


@pytest.mark.parametrize("how", ["stopped", "killed", "done"])
def test_what_has_a_session_of_its_own_ends_too(tmp_path: Path, how: str) -> None:
    """As torchrun's ranks have; a launcher that is killed, or is done, cannot end them itself."""
    child = tmp_path / "child"
    script = f"setsid bash -c 'echo $$ > {child}; exec sleep 60' & {'' if how == 'done' else 'wait'}"
    with (tmp_path / "log").open("wb") as log, process.started(["bash", "-c", script], log) as launcher:
        wait_for(child)
        if how == "killed":
            launcher.kill()
    assert ended(wait_for(child))


def test_only_what_comes_from_a_start_ends_with_it(tmp_path: Path) -> None:
    """A start within a start is ended with either; one beside it goes on."""
    log, pids = tmp_path / "log", tmp_path / "pids"
    inner = (
        "import os, subprocess, sys; from megatron_pp_ext.jobs import process\n"
        "with process.started(['sleep', '60'], subprocess.DEVNULL) as within:\n"
        f"    open({str(pids)!r}, 'w').write(str(within.pid)); os.kill(os.getpid(), 9)\n"
    )
    with log.open("wb") as output, process.started(["sleep", "60"], output) as beside:
        with process.started([sys.executable, "-c", inner], output):
            wait_for(pids)
        assert ended(wait_for(pids))
        assert beside.poll() is None


def test_one_failure_ends_the_others_and_says_why(tmp_path: Path) -> None:
    child = tmp_path / "child"
    failing = f"while ! [ -s {child} ]; do sleep 0.02; done; echo $RANK is wrong >&2; exit 3"
    commands = {
        0: (["bash", "-c", failing], {"RANK": "0"}),
        1: (["bash", "-c", f"echo $$ > {child}; exec sleep 60"], {"RANK": "1"}),
    }
    with pytest.raises(ValueError, match="the run of rank 0 ended with status 3: 0 is wrong"):
        process.run_together(commands, {rank: tmp_path / f"{rank}.log" for rank in commands})
    assert ended(wait_for(child))


def test_run_returns_the_status_or_none_in_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert process.run(["bash", "-c", "echo $WORD; echo err >&2; exit 5"], log, {"WORD": "out"}) == 5
    assert log.read_text() == "out\nerr\n"
    assert process.run(["sleep", "60"], log, timeout=0.1) is None


def test_command_lines_of_training() -> None:
    python, module = sys.executable, "megatron_pp_ext.pretrain_gpt"
    assert command.training(["--x"], None, cpu=True) == [python, "-m", module, "--cpu", "--x"]
    assert command.training(["--x"], 2, Path("mine.py"), cpu=False) == [
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "megatron_pp_ext", "mine.py", "--x",
    ]  # fmt: skip


def test_what_ignores_a_request_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.2)
    child = tmp_path / "child"
    script = f"trap '' TERM; echo $$ > {child}; while true; do sleep 0.05; done"
    with (tmp_path / "log").open("wb") as log, process.started(["bash", "-c", script], log):
        wait_for(child)
    assert ended(wait_for(child))


def test_variables_are_added_to_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "kept")
    monkeypatch.setenv("CHANGED", "before")
    log = tmp_path / "log"
    assert process.run(["bash", "-c", "echo $OWN $CHANGED"], log, {"CHANGED": "after"}) == 0
    assert log.read_text() == "kept after\n"
