"""The wheel, the batch scripts, a job for them, and stand-ins for SLURM's commands, which list calls."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_NODE = ROOT / "megatron_pp_ext/jobs/scripts/slurm_one_task_per_node.sbatch"
PER_GPU = ROOT / "megatron_pp_ext/jobs/scripts/slurm_one_task_per_gpu.sbatch"
BOTH = pytest.mark.parametrize("script", [PER_NODE, PER_GPU], ids=lambda script: script.stem)

FLAGS = shlex.split(
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 0.01 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 100000 "
    "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 64 --mock-data --eval-iters 0 "
    "--make-vocab-size-divisible-by 1 --log-interval 1 --ckpt-format torch_dist --save-interval 100000 "
    "--eval-interval 9"
)
"""A job whose steps take a small fraction of a second on CPUs, and which goes on until it is told to end."""

STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
    "scontrol show hostnames "*)
        while [[ -n "${SLOW:-}" && ! -e "$CALLS.go" ]]; do sleep 0.05; done
        printf 'first\\nsecond\\n'
        ;;
    "scontrol show job 12345"*) printf '   Requeue=1\\n   Command=%s --bf16\\n   WorkDir=/\\n' "$COMMAND" ;;
    "scancel "*)
        # The first one comes before the step is there.
        [[ -e "$CALLS.early" ]] || { touch "$CALLS.early"; exit 1; }
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
        [[ -z "${SAVES:-}" ]] || printf %s "$SAVES" > "$NEWEST"
        exit "${STATUS:-0}" ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes whose commands of SLURM are stand-ins."""
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


def calls(job: dict[str, str]) -> list[str]:
    return Path(job["CALLS"]).read_text().splitlines()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the project: building leaves files beside the sources."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="what builds the wheel is not installed")
    copy = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_pp_ext", copy / "megatron_pp_ext", ignore=ignored)
    program = "from hatchling import build; print(build.build_wheel('dist'))"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return copy / "dist" / built.stdout.split()[-1]
