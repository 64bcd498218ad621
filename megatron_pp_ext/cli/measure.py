"""Running the best candidates of a search for a few steps, and ranking them by what they really take."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress
from rich.table import Table

from megatron_pp_ext.cli.report import console
from megatron_pp_ext.jobs.job import WARM_UP, Job, Result, State, Submit, local, run_all
from megatron_pp_ext.jobs.slurm import Slurm
from megatron_pp_ext.jobs.training_run import command, short_run, whole_number, without_files
from megatron_pp_ext.planner.search.launch_lines import BATCH_SCRIPT

PLACES = ("local", "slurm")


class Where(NamedTuple):
    """Where jobs run, with how many GPUs, on nodes of how many, and what they run."""

    place: str
    gpus: int
    gpus_per_node: int
    script: Path | None

    def check(self, steps: int, timeout: float) -> None:
        """ValueError for what cannot be run: ``steps`` steps, each job within ``timeout`` seconds."""
        if steps < 1 or timeout <= 0:
            raise ValueError(f"--steps wants 1 or more and --timeout above 0, got {steps} and {timeout:g}")
        if self.place not in PLACES:
            raise ValueError(f"--submit got {self.place!r}, but takes {' or '.join(PLACES)}: correct it")
        if self.place == "local":
            here = devices()
            if self.gpus > here:
                raise ValueError(
                    f"--measure would run {self.gpus} ranks here, where {here} have a device: set --submit "
                    "slurm, or search for fewer with --gpus"
                )
        elif self.script is None:
            raise ValueError("--submit slurm needs your training script: set --script")
        elif not Path(BATCH_SCRIPT).is_file():
            raise ValueError(f"there is no {BATCH_SCRIPT} here: run it in the folder of this project")

    def words(self, flags: Sequence[str]) -> list[str]:
        """A job's command line; see ``jobs.Job``."""
        if self.place == "local":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
            return command(launcher, self.script, flags)
        nodes = -(-self.gpus // self.gpus_per_node)
        each = min(self.gpus, self.gpus_per_node)
        set_up = f"--export=ALL,SCRIPT={self.script},GPUS_PER_NODE={each}"
        # The batch script's own signal, ten minutes ahead of the limit, would save and queue the job again.
        signal = "--signal=B:CONT@1"
        return ["--nodes", str(nodes), f"--gpus-per-node={each}", signal, set_up, BATCH_SCRIPT, *flags]


def devices() -> int:
    """How many ranks can run here: the GPUs, or else the cores."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def run(
    candidates: Mapping[str, Sequence[str]], where: Where, folder: Path, steps: int, timeout: float
) -> dict[str, Result]:
    """Run ``candidates``, whose flags go by their names, each in its folder within ``folder``.

    ``steps`` are timed, after those that warm up; ``timeout`` is in seconds, a job.
    """
    where.check(steps, timeout)
    submit: Submit = local if where.place == "local" else Slurm()
    jobs = [_job(name, flags, where, folder.absolute() / name, steps) for name, flags in candidates.items()]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))

        def heard(job: Job, state: State) -> None:
            progress.update(task, description=f"{job.name} {state}", advance=int(state.is_final))

        progress.advance(task, sum(job.state.is_final for job in jobs))
        return run_all(jobs, submit, timeout, heard)


def ranked(results: Mapping[str, Result]) -> list[Result]:
    """By measured step, those without one last."""
    return sorted(results.values(), key=lambda result: result.step_seconds or float("inf"))


def show(results: Mapping[str, Result], estimates: Mapping[str, float]) -> None:
    """A table, ``estimates`` being seconds of a step by name."""
    table = Table("candidate", "state", "step s", "estimated s", "error", "peak GB", "what went wrong")
    for result in ranked(results):
        step, estimate = result.step_seconds, estimates[result.name]
        peak = result.device_bytes or max(result.activation_bytes or (0,))
        table.add_row(
            result.name,
            str(result.state),
            f"{step:.4g}" if step else "",
            f"{estimate:.4g}",
            f"{estimate / step - 1:+.1%}" if step else "",
            f"{peak / 1e9:.2f}" if peak else "",
            result.problem,
        )
    console.print(table)


def _job(name: str, flags: Sequence[str], where: Where, folder: Path, steps: int) -> Job:
    changed: dict[str, object] = {"--log-interval": 1}
    if where.place == "local" and whole_number(flags, "--pipeline-model-parallel-size") > 1:
        import torch

        if not torch.cuda.is_available():
            # No allocator to ask: the recorder tells the peaks of activations.
            changed["--pipeline-trace"] = Job(name, (), folder).trace
    kept = list(without_files(flags))
    return Job(name, tuple(where.words(short_run(kept, WARM_UP + steps, changed))), folder)
