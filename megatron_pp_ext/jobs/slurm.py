"""Jobs on a SLURM cluster: all are submitted at once, and then waited for."""

import math
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.jobs.job import BatchJob, OnChange, RunState, change

_STATES = {
    "PENDING": RunState.PENDING,
    "CONFIGURING": RunState.PENDING,
    "REQUEUED": RunState.PENDING,
    "SUSPENDED": RunState.PENDING,
    "RUNNING": RunState.RUNNING,
    "COMPLETING": RunState.RUNNING,
    "COMPLETED": RunState.COMPLETED,
    "OUT_OF_MEMORY": RunState.OOM,
    "TIMEOUT": RunState.TIMEOUT,
    "DEADLINE": RunState.TIMEOUT,
}
"""Jobs by their state in SLURM; all other states (FAILED, CANCELLED, NODE_FAIL ...) are failures."""

_QUEUE = ("squeue", "--noheader", "--states=all", "--format=%i %T")
"""Lists jobs that wait or run."""

_ACCOUNTS = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State")
"""Lists jobs that have left the queue, if the cluster keeps accounts."""

UNKNOWN_AT_MOST = 10
"""Queries in a row for which a job may be in neither queue nor accounts: each lags after the other."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """Submits jobs and queries their states every ``poll_seconds``; see ``job.Submit``."""

    poll_seconds: float = 15.0

    def __call__(self, jobs: Sequence[BatchJob], timeout: float, on_change: OnChange) -> None:
        """Submit the jobs that SLURM does not have yet, and wait for all."""
        if jobs and shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch here: run where SLURM is, or run the jobs on this machine")
        waiting = {number: job for job in jobs if (number := _submitted(job, timeout, on_change))}
        unknown = dict.fromkeys(waiting, 0)
        while waiting := {number: job for number, job in waiting.items() if not job.state.is_final}:
            states = _states(_QUEUE, None, list(waiting))
            ended = [number for number in waiting if number not in states]
            states |= _states(_ACCOUNTS, "|", ended) if ended else {}
            for number, job in waiting.items():
                unknown[number] = 0 if number in states else unknown[number] + 1
                if number in states:
                    change(job, states[number], on_change)
                elif unknown[number] > UNKNOWN_AT_MOST:
                    # A cluster without accounts: ``change`` finds a failure in the log.
                    change(job, RunState.COMPLETED, on_change)
            if any(not job.state.is_final for job in waiting.values()):
                time.sleep(self.poll_seconds)


def _submitted(job: BatchJob, timeout: float, on_change: OnChange) -> str | None:
    """Return SLURM's number for ``job``; None if SLURM refuses it, which fails the job."""
    number_file = job.directory / "slurm_id"
    if job.state in (RunState.PENDING, RunState.RUNNING) and number_file.exists():
        return number_file.read_text(encoding="utf-8").strip()
    job.begin()
    minutes = str(max(1, math.ceil(timeout / 60)))
    options = ["--parsable", "--no-requeue", "--job-name", job.name, "--time", minutes]
    options += ["--output", str(job.log)]
    # "id" or "id;cluster"
    try:
        number = _output(["sbatch", *options, *job.command]).strip().partition(";")[0]
    except ValueError as error:
        write_whole(job.log, f"{error}\n")
        change(job, RunState.FAIL, on_change)
        return None
    write_whole(number_file, number)
    change(job, RunState.PENDING, on_change)
    return number


def _states(command: Sequence[str], separator: str | None, numbers: list[str]) -> dict[str, RunState]:
    """Return the states of jobs by number as ``command`` lists them; empty if it knows none of them."""
    try:
        printed = _output([*command, "--jobs", ",".join(numbers)])
    except ValueError:
        return {}
    rows = [line.split(separator) for line in printed.splitlines()]
    # "CANCELLED by 1000"
    return {row[0]: _STATES.get(row[1].split()[0], RunState.FAIL) for row in rows if len(row) == 2 and row[1]}


def _output(words: list[str]) -> str:
    """Return the output of a command of SLURM; ValueError with its error message."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"there is no {words[0]} here") from None
    if run.returncode:
        problem = " ".join(run.stderr.split()) or f"it ended with status {run.returncode}"
        raise ValueError(f"{words[0]}: {problem}")
    return run.stdout
