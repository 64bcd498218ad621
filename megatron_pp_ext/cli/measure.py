"""Running the best candidates of a search for a few steps, and ranking them by their measured steps."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from megatron_pp_ext.cli.report import console, folding
from megatron_pp_ext.jobs.command import short_run, training, whole_number, without
from megatron_pp_ext.jobs.job import WARM_UP, BatchJob, Result, RunState, Slurm, Submit, local, run_all
from megatron_pp_ext.planner.search.launch_lines import BATCH_SCRIPT, environment

PLACES = ("local", "slurm")


class RunPlace(NamedTuple):
    """Where jobs run, the number of GPUs of each job and of each node, and the script that they run."""

    place: str
    gpus: int
    gpus_per_node: int
    script: Path | None

    def check(self, steps: int, timeout: float) -> None:
        """Raise ValueError if jobs of ``steps`` steps and ``timeout`` seconds cannot run there."""
        if steps < 1 or timeout <= 0:
            raise ValueError(f"--steps wants 1 or more and --timeout above 0, got {steps} and {timeout:g}")
        if self.place not in PLACES:
            raise ValueError(f"--submit got {self.place!r}, but takes {' or '.join(PLACES)}: correct it")
        if self.place == "local":
            count = devices()
            if self.gpus > count:
                raise ValueError(
                    f"--measure would run {self.gpus} ranks here, where {count} have a device: set --submit "
                    "slurm, or search for fewer with --gpus"
                )

    def words(self, flags: Sequence[str]) -> list[str]:
        """Return a job's command line; see ``jobs.job.BatchJob``."""
        if self.place == "local":
            variables = [f"{name}={value}" for name, value in environment(flags).items()]
            return [*(["env", *variables] if variables else []), *training(flags, self.gpus, self.script)]
        nodes = -(-self.gpus // self.gpus_per_node)
        gpus = min(self.gpus, self.gpus_per_node)
        set_up = f"--export=ALL,SCRIPT={self.script or ''},GPUS_PER_NODE={gpus}"
        # The batch script's own signal, ten minutes ahead of the limit, would save and queue the job again.
        signal = "--signal=B:CONT@1"
        return ["--nodes", str(nodes), f"--gpus-per-node={gpus}", signal, set_up, BATCH_SCRIPT, *flags]


def devices() -> int:
    """Return how many ranks can run here: the number of GPUs, or else of cores."""
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def run(
    candidates: Mapping[str, Sequence[str]], target: RunPlace, folder: Path, steps: int, timeout: float
) -> dict[str, Result]:
    """Run ``candidates`` (name to flags), each in a folder of its name within ``folder``.

    ``steps`` steps are timed after those that warm up; ``timeout`` is in seconds for each job.
    """
    target.check(steps, timeout)
    submit: Submit = local if target.place == "local" else Slurm()
    jobs = [_job(name, flags, target, folder.absolute() / name, steps) for name, flags in candidates.items()]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))

        def show_progress(job: BatchJob, state: RunState) -> None:
            progress.update(task, description=f"{job.name} {state}", advance=int(state.is_final))

        progress.advance(task, sum(job.state.is_final for job in jobs))
        return run_all(jobs, submit, timeout, show_progress)


def ranked(results: Mapping[str, Result]) -> list[Result]:
    """Return results by measured step, those without one last."""
    return sorted(results.values(), key=lambda result: result.step_seconds or float("inf"))


def show(results: Mapping[str, Result], estimates: Mapping[str, float]) -> None:
    """Print a table of measured and estimated steps; ``estimates`` are seconds by name."""
    table = folding("candidate", "state", "step s", "estimated s", "error", "peak GB")
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
        )
    console.print(table)
    for result in ranked(results):
        if result.problem:
            console.print(f"{result.name}: {result.problem}")


def _job(name: str, flags: Sequence[str], target: RunPlace, folder: Path, steps: int) -> BatchJob:
    changed: dict[str, object] = {"--log-interval": 1}
    if target.place == "local" and whole_number(flags, "--pipeline-model-parallel-size") > 1:
        import torch

        if not torch.cuda.is_available():
            # There is no allocator to report a peak, so the recorder measures the activations.
            changed["--pipeline-trace"] = BatchJob(name, (), folder).trace
    training_flags = list(without(flags))
    return BatchJob(name, tuple(target.words(short_run(training_flags, WARM_UP + steps, changed))), folder)
