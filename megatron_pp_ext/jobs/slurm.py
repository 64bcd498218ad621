"""Jobs on a SLURM cluster: all submitted at once, then waited for."""

import math
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp_ext.jobs.job import Heard, Job, State, change

_STATES = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "REQUEUED": State.PENDING,
    "SUSPENDED": State.PENDING,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "COMPLETED": State.COMPLETED,
    "OUT_OF_MEMORY": State.OOM,
    "TIMEOUT": State.TIMEOUT,
    "DEADLINE": State.TIMEOUT,
}
"""Everything else is a failure: FAILED, CANCELLED, NODE_FAIL and so on."""

UNKNOWN_AT_MOST = 10
"""How often in a row a job may be in neither queue nor accounts, which lag behind each other."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """Submits jobs and asks every ``poll_seconds`` how they are; see ``jobs.Submit``."""

    poll_seconds: float = 15.0

    def __call__(self, jobs: Sequence[Job], timeout: float, heard: Heard) -> None:
        """Submit what is not with SLURM yet, and wait for all."""
        if jobs and shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch here: run where SLURM is, or run the jobs on this machine")
        waiting = {number: job for job in jobs if (number := _submitted(job, timeout, heard))}
        unknown = dict.fromkeys(waiting, 0)
        while waiting := {number: job for number, job in waiting.items() if not job.state.is_final}:
            known = _queue(list(waiting))
            gone = [number for number in waiting if number not in known]
            known |= _accounts(gone) if gone else {}
            for number, job in waiting.items():
                unknown[number] = 0 if number in known else unknown[number] + 1
                if number in known:
                    change(job, known[number], heard)
                elif unknown[number] > UNKNOWN_AT_MOST:
                    # A cluster without accounts: the log tells whether all went well.
                    change(job, State.COMPLETED, heard)
            if any(not job.state.is_final for job in waiting.values()):
                time.sleep(self.poll_seconds)


def _submitted(job: Job, timeout: float, heard: Heard) -> str | None:
    """The number under which SLURM knows ``job``; None if it will not take it, which fails the job."""
    told = job.directory / "slurm_id"
    if job.state in (State.PENDING, State.RUNNING) and told.exists():
        return told.read_text(encoding="utf-8").strip()
    job.begin()
    minutes = str(max(1, math.ceil(timeout / 60)))
    options = [
        "--parsable",
        "--no-requeue",
        "--job-name",
        job.name,
        "--time",
        minutes,
        "--output",
        str(job.log),
    ]
    # "id" or "id;cluster"
    try:
        number = _ask(["sbatch", *options, *job.command]).strip().partition(";")[0]
    except ValueError as error:
        job.log.write_text(f"{error}\n", encoding="utf-8")
        change(job, State.FAIL, heard)
        return None
    told.write_text(number, encoding="utf-8")
    change(job, State.PENDING, heard)
    return number


def _queue(numbers: list[str]) -> dict[str, State]:
    """Of jobs that wait or run; SLURM refuses to answer for numbers that it has forgotten."""
    asked = ["squeue", "--noheader", "--states=all", "--format=%i %T", "--jobs", ",".join(numbers)]
    try:
        rows = [line.split() for line in _ask(asked).splitlines()]
    except ValueError:
        return {}
    return {row[0]: _STATES.get(row[1], State.FAIL) for row in rows if len(row) == 2}


def _accounts(numbers: list[str]) -> dict[str, State]:
    """Of jobs that have left the queue; nothing where the cluster keeps no accounts."""
    columns = ["--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State"]
    try:
        rows = [
            line.split("|") for line in _ask(["sacct", *columns, "--jobs", ",".join(numbers)]).splitlines()
        ]
    except ValueError:
        return {}
    # "CANCELLED by 1000"
    return {row[0]: _STATES.get(row[1].split()[0], State.FAIL) for row in rows if len(row) == 2 and row[1]}


def _ask(words: list[str]) -> str:
    """What a command of SLURM's prints; ValueError with its complaint."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"there is no {words[0]} here") from None
    if run.returncode:
        said = " ".join(run.stderr.split()) or f"it ended with status {run.returncode}"
        raise ValueError(f"{words[0]}: {said}")
    return run.stdout
