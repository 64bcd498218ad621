"""An error of ours ends a job with one line of one rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext import __main__, launch, launch_errors
from megatron_pp_ext.schedule import catalog
from tests.support.tiers import first

REFUSED = """
from megatron_pp_ext import __main__, launch, launch_errors
launch_errors.PATIENCE = float({patience!r})
with launch_errors.in_one_line():
    print("started", flush=True)
    raise SystemExit("megatron_pp_ext: no schedule is called 'x'")
"""


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch):
    """Make this process a rank of a job that nothing ends while it waits."""

    def be(rank: int, local_rank: int, error_file: Path) -> list[float]:
        waited: list[float] = []
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        monkeypatch.setattr(launch_errors.time, "sleep", waited.append)
        monkeypatch.setattr(launch_errors.signal, "signal", lambda *_: None)
        return waited

    return be


@pytest.mark.parametrize(
    ("rank", "local_rank", "patience"),
    [(0, 0, []), (1, 1, [2 * launch_errors.PATIENCE]), (8, 0, [launch_errors.PATIENCE])],
)
def test_rank_0_speaks_first(on_rank, rank, local_rank, patience, tmp_path, capsys):
    waited = on_rank(rank, local_rank, tmp_path / "error")
    with pytest.raises(SystemExit) as end, launch_errors.in_one_line():
        raise SystemExit("megatron_pp_ext: a value,\n  the rule and the fix")
    assert (end.value.code, waited) == (2, patience)
    line = "megatron_pp_ext: a value, the rule and the fix"
    assert capsys.readouterr().err == f"{line}\n"
    about = json.loads((tmp_path / "error").read_text())["message"]["extraInfo"]
    assert about["py_callstack"] == line


def test_an_error_that_this_package_raises_while_training(on_rank, tmp_path: Path, capsys) -> None:
    on_rank(0, 0, tmp_path / "error")
    with pytest.raises(SystemExit), launch_errors.in_one_line():
        catalog.build("v-haf", 4, 8)
    assert capsys.readouterr().err.startswith("megatron_pp_ext: no schedule is called 'v-haf'")


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), SystemExit("the script's"), ValueError("x")])
def test_what_is_not_ours_passes(on_rank, error: BaseException, tmp_path: Path) -> None:
    on_rank(0, 0, tmp_path / "error")
    with pytest.raises(type(error)) as raised, launch_errors.in_one_line():
        raise error
    assert raised.value is error
    assert not (tmp_path / "error").exists()


def test_a_package_that_the_model_needs_is_named_in_one_line(on_rank, tmp_path: Path, capsys) -> None:
    """Megatron adds every module around the one that needs it; a Mamba layer needs mamba-ssm."""
    on_rank(0, 0, tmp_path / "error")
    said = "MambaSSM is not installed. Please install it with `pip install mamba-ssm`."
    with pytest.raises(SystemExit) as end, launch_errors.in_one_line():
        raise ImportError(f"{said} when instantiating MambaMixer when instantiating HybridStack")
    assert end.value.code == launch_errors.STATUS
    assert capsys.readouterr().err == f"megatron_pp_ext: {said}\n"


def test_a_rank_that_waits_ends_quietly_when_it_is_told_to() -> None:
    code = REFUSED.format(patience="60")
    environment = {"RANK": "1", "LOCAL_RANK": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        rank.stdout.readline()
        # It may not wait yet; until it does, the signal ends it as any process.
        while rank.poll() is None:
            if "sigterm" in _caught(rank.pid):
                rank.send_signal(signal.SIGTERM)
                rank.wait(60)
        assert (rank.returncode, rank.stderr.read()) == (0, "")


def _caught(pid: int) -> list[str]:
    """The signals that a process has handlers for."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigCgt:\s+([0-9a-f]+)$", status, re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return ["sigterm"] if mask >> (signal.SIGTERM - 1) & 1 else []


def test_torchrun_shows_the_line_of_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED.format(patience="600"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in run.stderr.splitlines() if "no schedule is called" in line]
    assert run.returncode
    assert lines[0] == "megatron_pp_ext: no schedule is called 'x'"
    # And once more at the end of torchrun's own report, which has the cause last.
    assert [line.split() for line in lines[1:]] == [["traceback", ":", *lines[0].split()]]


LOST_PEER = """
import os, sys, torch, torch.distributed as dist
from megatron_pp_ext import __main__, launch, launch_errors
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.schedule.messages import Message

def main():
    dist.init_process_group("gloo")
    channels = Channels([0, 1], *direction_groups([0, 1]), (4,), torch.float32, torch.device("cpu"))
    message = Message(1, 0, 3)
    if dist.get_rank() == 1:
        dist.barrier()
        os.kill(os.getpid(), 9)
    if {is_message}:
        channels.post(1, message)
        dist.barrier()
        channels.receive(1, message)
    else:
        dist.barrier()
        dist.all_reduce(torch.ones(1))

with launch_errors.in_one_line():
    main()
"""


@pytest.mark.parametrize("is_message", first(1, [True, False]))
def test_a_rank_that_is_killed_costs_each_of_the_others_one_line(is_message: bool) -> None:
    """The survivor names the rank and what it was waiting for, as far as that is known."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", LOST_PEER.format(is_message=is_message)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **about, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    printed = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [launch_errors.LOST, -signal.SIGKILL]
    lines = [line for line in printed[0].splitlines() if not line.startswith("[W")]
    assert len(lines) == 1, printed[0]
    name, activity = (
        ("rank 1", "waiting for the gradient of microbatch 3 from stage 1")
        if is_message
        else ("another rank", "in its training script")
    )
    assert lines[0].startswith(
        f"megatron_pp_ext: {name} has ended, or does not answer, while rank 0 was {activity} ("
    )


def test_other_errors_while_training_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), launch_errors.in_one_line():
        raise RuntimeError("CUDA out of memory")


def test_a_script_of_this_package_leaves_its_folder_off_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder ``megatron`` is a part of this package, which would hide Megatron."""
    own = os.path.dirname(os.path.realpath(__main__.__file__))
    monkeypatch.setattr(sys, "path", [own, "/elsewhere"])
    monkeypatch.setattr(launch, "install", lambda cpu: None)
    __main__.prepare()
    assert sys.path == ["/elsewhere"]
