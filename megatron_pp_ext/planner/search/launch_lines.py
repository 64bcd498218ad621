"""The commands that start training: a torchrun line, or a script that submits it to SLURM."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pp_ext.job.flag_table import by_name

BATCH_SCRIPT = str(Path(__file__).parents[2] / "jobs/scripts/slurm_one_task_per_node.sbatch")
"""The package's own batch script by its whole path, so that jobs can be submitted from any folder."""

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_WITHOUT_QUEUES = {"--use-torch-fsdp2", "--use-megatron-fsdp", "--overlap-moe-expert-parallel-comm"}
"""Flags under which Megatron does not ask for one hardware queue (validate_args in its arguments.py)."""

_MEETING = "$MASTER_ADDR:29500"
"""The one word that a shell replaces: all others are quoted, since files and users may have any."""

_COLUMNS = 79


def environment(flags: Sequence[str]) -> dict[str, str]:
    """Return the variables that Megatron asserts for ``flags`` on GPUs before Blackwell, where none harm.

    With tensor or context parallelism it demands a single hardware queue.
    """
    flag_values = dict(by_name(flags))
    sizes = (flag_values.get(f"--{kind}-parallel-size") for kind in ("tensor-model", "context"))
    is_cut = any(size not in (None, [], ["1"]) for size in sizes)
    return {_QUEUES: "1"} if is_cut and not _WITHOUT_QUEUES & flag_values.keys() else {}


def about_placeholders(flags: Sequence[str]) -> str:
    """Return a line about ``flags`` that stand in for the user's; empty without any."""
    names = ", ".join(name for name, _ in by_name(flags))
    return f"Placeholders, to be replaced by yours: {names}" if names else ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Training with Megatron's ``flags`` on ``gpus`` GPUs, by ``script`` or this package's pretrain_gpt."""

    flags: Sequence[str]
    gpus: int
    gpus_per_node: int
    script: Path | None = None

    @property
    def torchrun(self) -> list[str]:
        """The command to run on each node; several nodes meet at ``$MASTER_ADDR``."""
        nodes = -(-self.gpus // self.gpus_per_node)
        while self.gpus % nodes:
            nodes += 1
        words = ["torchrun"]
        if nodes > 1:
            words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", _MEETING]
        words += ["--nproc-per-node", str(self.gpus // nodes), "-m"]
        if self.script is None:
            return [*words, "megatron_pp_ext.pretrain_gpt", *self.flags]
        return [*words, "megatron_pp_ext", str(self.script), *self.flags]

    @property
    def line(self) -> str:
        """The command as one line for a shell; variables stay variables."""
        return " ".join(self._words())

    @property
    def text(self) -> str:
        """The command for a shell, in lines that are continued and fit 80 columns."""
        return _continued(self._words())

    def record(self) -> dict[str, Any]:
        """Return the command and its parts for a JSON file."""
        return {
            "command": self.line,
            "environment": environment(self.flags),
            "torchrun": self.torchrun,
            "flags": list(self.flags),
        }

    def _words(self) -> list[str]:
        variables = [f"{name}={value}" for name, value in environment(self.flags).items()]
        return [*variables, *map(_quoted, self.torchrun)]


def one_a_line(words: Sequence[str]) -> str:
    """Return flags for a shell, one with its values in each line; all but the last are continued."""
    return " \\\n".join(" ".join(map(_quoted, (name, *behind))) for name, behind in by_name(words))


def folded(words: Sequence[str], indent: int) -> str:
    """Return flags for a shell in continued lines that fit 80 columns after ``indent`` spaces."""
    return _continued([*map(_quoted, words)], indent)


def batch_file(name: str, flags: Sequence[str], gpus: int, gpus_per_node: int, comment: str) -> str:
    """Return a shell script that submits the job ``name``, from any folder."""
    nodes, ranks = max(1, gpus // gpus_per_node), min(gpus, gpus_per_node)
    submit = ["sbatch", f"--job-name={name}", f"--nodes={nodes}", f"--gpus-per-node={ranks}"]
    return "\n".join(
        (
            "#!/bin/bash",
            f"# {comment}",
            "# Without SCRIPT=Megatron-LM/pretrain_gpt.py in front, the package's own pretrain_gpt trains.",
            "# The folder that it is called in becomes the job's; docs/slurm.md lists what else can be set.",
            f"export GPUS_PER_NODE={ranks}",
            f'exec {shlex.join([*submit, BATCH_SCRIPT, *flags])} "$@"',
            "",
        )
    )


def _quoted(word: str) -> str:
    return word if word == _MEETING else shlex.quote(word)


def _continued(words: Sequence[str], margin: int = 0) -> str:
    """Return ``words``, quoted already, in continued lines; a flag stays on the line of its first value."""
    pieces: list[str] = []
    for word in words:
        if pieces and not word.startswith("-") and pieces[-1].startswith("-") and " " not in pieces[-1]:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    indent, lines = " " * margin, [pieces[0]]
    for piece in pieces[1:]:
        if len(f"{indent}{lines[-1]} {piece} \\") <= _COLUMNS:
            lines[-1] += f" {piece}"
        else:
            indent = " " * (margin + 2)
            lines.append(piece)
    return f" \\\n{' ' * (margin + 2)}".join(lines)
