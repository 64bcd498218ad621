"""What the batch scripts do when a job's time runs out, with stand-ins for SLURM's commands."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.conftest import BOTH, FLAGS, PER_NODE, ROOT, calls
from tests.support.tiers import first


def wait_for(call: str, job: dict[str, str], batch: subprocess.Popen) -> None:
    while not (Path(job["CALLS"]).exists() and any(one.startswith(call) for one in calls(job))):
        assert batch.poll() is None
        time.sleep(0.05)


@pytest.fixture
def saved(job: dict[str, str], tmp_path: Path) -> Path:
    """The folder of checkpoints of a job whose ranks end when they are told."""
    folder = tmp_path / "my saved"
    folder.mkdir()
    job |= {"WAITS": "1", "STATUS": "1", "NEWEST": str(folder / "latest_checkpointed_iteration.txt")}
    return folder


@BOTH
@pytest.mark.parametrize(
    ("before", "flags"), first(1, [("3", "--save=other --save={}"), (None, "--save {}")])
)
def test_a_job_at_its_time_limit_is_queued_again(script, before, flags, saved, job):
    """SLURM signals the batch script; the ranks are told, and are waited for; then the job is queued."""
    if before:
        Path(job["NEWEST"]).write_text(before)
    words = [word.format(saved) for word in flags.split()]
    batch = subprocess.Popen(["bash", str(script), "--bf16", *words], env=job | {"SAVES": "12"})
    wait_for("srun", job, batch)
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(timeout=30) == 0
    assert calls(job)[-2:] == ["scancel --signal=INT 12345.0", "scontrol requeue 12345"]


@BOTH
@pytest.mark.parametrize(
    ("before", "flags", "why"),
    first(
        1,
        [
            (None, ["--save"], "it has trained and saved no step since it started (the newest in {} is 0)"),
            ("12", ["--save"], "it has trained and saved no step since it started (the newest in {} is 12)"),
            (None, [], "it has no --save, and would start from nothing: give --save and --load one folder"),
        ],
    ),
)
def test_a_job_that_saved_no_step_is_not(script, before, flags, why, saved, job):
    """It would do the same for ever; here it is told before it has even started its ranks."""
    if before:
        Path(job["NEWEST"]).write_text(before)
    words = ["bash", str(script), *(word for flag in flags for word in (flag, str(saved)))]
    own = job | {"SLOW": "1"} | ({"SAVES": before} if before else {})
    batch = subprocess.Popen(words, env=own, stderr=subprocess.PIPE, text=True)
    wait_for("scontrol show hostnames", job, batch)
    batch.send_signal(signal.SIGUSR1)
    Path(f"{job['CALLS']}.go").touch()
    _, printed = batch.communicate(timeout=30)
    assert batch.returncode == 1
    assert printed.startswith(f"job 12345 is not queued again: {why.format(saved)}")
    assert printed.count("\n") == 1
    assert calls(job)[-1] == "scancel --signal=INT 12345.0"


@pytest.mark.wide
def test_the_ranks_save_when_told(job: dict[str, str], tmp_path: Path) -> None:
    """One node, two ranks on the CPU: torchrun passes the signal on, and waits until they have saved."""
    flags = ["--cpu", *FLAGS, "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half"]
    own = {
        "REALLY": "1",
        "RANK_LOGS": str(tmp_path / "logs"),
        "PYTHON": sys.executable,
        "SCRIPT": str(ROOT / "megatron_pp_ext/pretrain_gpt.py"),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "GPUS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 10000),
    }
    log, saved = tmp_path / "log", tmp_path / "saved"
    with log.open("w") as output:
        batch = subprocess.Popen(
            ["bash", str(PER_NODE), *flags, "--save", str(saved)],
            env=job | own,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    end = time.monotonic() + 200
    while not re.search(r"iteration +2/", log.read_text()):
        assert batch.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(timeout=200) == 0
    assert calls(job)[-1] == "scontrol requeue 12345"
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) >= 2, log.read_text()[-3000:]
    logs = [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert sum("iteration        2/" in text for text in logs) == 1  # one rank logs the training
    assert any("successfully saved checkpoint" in text for text in logs), logs  # tee outlives SIGINT


@BOTH
@pytest.mark.parametrize("status", [0, 3])
def test_a_job_that_ends_by_itself_is_not(script: Path, job: dict[str, str], status: int) -> None:
    batch = subprocess.run(["bash", str(script)], env=job | {"STATUS": str(status)}, check=False)
    assert batch.returncode == status
    assert not any("requeue" in call for call in calls(job))


@BOTH
def test_slurm_is_asked_to_tell_early_and_to_queue_again(script: Path) -> None:
    asked = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in asked
    assert "#SBATCH --signal=B:USR1@600" in asked
