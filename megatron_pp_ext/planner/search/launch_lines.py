"""From a candidate to what starts it: a torchrun line, or a script that submits it to SLURM."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pp_ext.planner.search.candidate import Candidate, spelled, strip

BATCH_SCRIPT = "scripts/slurm_one_task_per_node.sbatch"


def flags(candidate: Candidate, model: Sequence[str]) -> list[str]:
    """``model``, a launch script's flags, with the candidate's in the place of its own."""
    return [*strip(model), *candidate.flags()]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """A description by Megatron's names as flags."""
    return list(spelled(dict(values)))


def torchrun(
    candidate: Candidate, model: Sequence[str], gpus: int, gpus_per_node: int, script: str = "pretrain_gpt.py"
) -> list[str]:
    """The command for each node; several nodes meet at ``$MASTER_ADDR``."""
    nodes = max(1, gpus // gpus_per_node)
    meeting = (
        ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "$MASTER_ADDR:29500"]
        if nodes > 1
        else []
    )
    ranks = ["--nproc-per-node", str(min(gpus, gpus_per_node))]
    return ["torchrun", *meeting, *ranks, "-m", "megatron_pp_ext", script, *flags(candidate, model)]


def line(command: Sequence[str]) -> str:
    """A command as a shell reads it; variables stay variables."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in command)


def batch_file(
    candidate: Candidate, model: Sequence[str], gpus: int, gpus_per_node: int, comment: str
) -> str:
    """A shell script that submits the candidate, from the folder of this project."""
    nodes, ranks = max(1, gpus // gpus_per_node), min(gpus, gpus_per_node)
    submit = ["sbatch", f"--job-name={candidate.name}", f"--nodes={nodes}", f"--gpus-per-node={ranks}"]
    return "\n".join(
        (
            "#!/bin/bash",
            f"# {comment}",
            "# From the folder of this project; scripts/slurm_job.sh tells what else can be set.",
            'export SCRIPT="${SCRIPT:?set it to the training script, such as Megatron-LM/pretrain_gpt.py}"',
            f"export GPUS_PER_NODE={ranks}",
            f'exec {shlex.join([*submit, BATCH_SCRIPT, *flags(candidate, model)])} "$@"',
            "",
        )
    )
