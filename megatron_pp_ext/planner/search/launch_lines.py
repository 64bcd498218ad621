"""The commands that start a candidate: a torchrun line, or a script that submits it to SLURM."""

import shlex
from collections.abc import Sequence

from megatron_pp_ext.planner.search.candidate import Candidate, strip

BATCH_SCRIPT = "scripts/slurm_one_task_per_node.sbatch"


def flags(candidate: Candidate, model: Sequence[str]) -> list[str]:
    """Return ``model``, a launch script's flags, with the candidate's in place of its own."""
    return [*strip(model), *candidate.flags()]


def torchrun(
    candidate: Candidate, model: Sequence[str], gpus: int, gpus_per_node: int, script: str = "pretrain_gpt.py"
) -> list[str]:
    """Return the command to run on each node; several nodes meet at ``$MASTER_ADDR``."""
    words = ["torchrun"]
    if gpus >= 2 * gpus_per_node:
        words += ["--nnodes", str(gpus // gpus_per_node), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "$MASTER_ADDR:29500"]
    words += ["--nproc-per-node", str(min(gpus, gpus_per_node)), "-m", "megatron_pp_ext", script]
    return [*words, *flags(candidate, model)]


def line(command: Sequence[str]) -> str:
    """Return a command as a shell reads it; variables stay variables."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in command)


def batch_file(
    candidate: Candidate, model: Sequence[str], gpus: int, gpus_per_node: int, comment: str
) -> str:
    """Return a shell script that submits the candidate, to be run from the folder of this project."""
    nodes, ranks = max(1, gpus // gpus_per_node), min(gpus, gpus_per_node)
    submit = ["sbatch", f"--job-name={candidate.name}", f"--nodes={nodes}", f"--gpus-per-node={ranks}"]
    return "\n".join(
        (
            "#!/bin/bash",
            f"# {comment}",
            "# Run it from the folder of this project; scripts/slurm_job.sh lists what else can be set.",
            'export SCRIPT="${SCRIPT:?set it to the training script, such as Megatron-LM/pretrain_gpt.py}"',
            f"export GPUS_PER_NODE={ranks}",
            f'exec {shlex.join([*submit, BATCH_SCRIPT, *flags(candidate, model)])} "$@"',
            "",
        )
    )
