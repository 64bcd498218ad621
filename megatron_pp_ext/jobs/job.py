"""Runs of candidates for a few steps, on this machine or on a SLURM cluster, and their measurements."""

import fcntl
import json
import math
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median

from megatron_pp_ext.files import read_text, write_whole
from megatron_pp_ext.jobs import process
from megatron_pp_ext.jobs.failure import is_out_of_memory, reason

WARM_UP = 2
"""Steps at the start of a run that are not measured."""

_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_MEMORY = re.compile(r"memory \(MB\).*?max allocated: ([0-9.]+)")


class RunState(StrEnum):
    """The state of a job."""

    INIT = "init"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    OOM = "oom"
    TIMEOUT = "timeout"
    FAIL = "fail"

    @property
    def is_final(self) -> bool:
        return self in (RunState.COMPLETED, RunState.OOM, RunState.TIMEOUT, RunState.FAIL)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A run of a few training steps that logs each of them.

    ``command`` is the command line: the whole of it on this machine, what follows ``sbatch`` on a cluster.
    ``directory`` belongs to the job alone, and is made when it first runs.
    """

    name: str
    command: tuple[str, ...]
    directory: Path

    @property
    def log(self) -> Path:
        """The file with all output of the run."""
        return self.directory / "log.txt"

    @property
    def trace(self) -> Path:
        """The file for the recorder's findings, if the run has --pipeline-trace."""
        return self.directory / "trace.json"

    @property
    def state(self) -> RunState:
        """The recorded state; INIT if the folder was left by a job with another command."""
        try:
            same = (self.directory / "command").read_text(encoding="utf-8") == self._written
            return (
                RunState((self.directory / "state").read_text(encoding="utf-8").strip())
                if same
                else RunState.INIT
            )
        except (FileNotFoundError, ValueError):
            return RunState.INIT

    def begin(self) -> None:
        """Make the folder, without any files of an earlier run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("log.txt", "trace.json", "slurm_id"):
            (self.directory / name).unlink(missing_ok=True)
        write_whole(self.directory / "command", self._written)
        self.become(RunState.INIT)

    def become(self, state: RunState) -> None:
        """Record ``state`` atomically."""
        write_whole(self.directory / "state", f"{state}\n")

    def output(self) -> str:
        """Return the log of the run so far."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def _written(self) -> str:
        return shlex.join(self.command) + "\n"


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a job, or why it has none.

    ``step_seconds`` is the median step; ``device_bytes`` the largest peak of any rank's allocator, None
    without a device; ``activation_bytes`` the recorder's peak of each rank, if the run had one.  ``problem``
    is one line about a job that did not complete.
    """

    name: str
    state: RunState
    step_seconds: float | None = None
    device_bytes: float | None = None
    activation_bytes: tuple[int, ...] | None = None
    problem: str = ""


OnChange = Callable[[BatchJob, RunState], None]
"""Called at each change of a job's state."""

Submit = Callable[[Sequence[BatchJob], float, OnChange], None]
"""Runs jobs to their end, each for at most so many seconds."""


def run_all(
    jobs: Sequence[BatchJob], submit: Submit, timeout: float, on_change: OnChange = lambda job, state: None
) -> dict[str, Result]:
    """Run the jobs that have not ended yet, and return all results by name.

    A job that fails is reported in its result, and the others continue.  ``timeout`` is in seconds for each
    job.  Raises ValueError for two jobs with the same name or folder.

    Each job has a folder, in which a one-word file holds its state.  A search that was interrupted therefore
    continues where it stopped: jobs that have ended are kept, jobs that were running on this machine run
    again, and jobs that SLURM has are waited for.  To run a job once more, delete its folder.
    """
    for field in ("name", "directory"):
        if len({getattr(job, field) for job in jobs}) < len(jobs):
            raise ValueError(f"two jobs have the same {field}: give each its own")
    submit([job for job in jobs if not job.state.is_final], timeout, on_change)
    return {job.name: read(job) for job in jobs}


def local(jobs: Sequence[BatchJob], timeout: float, on_change: OnChange) -> None:
    """Run jobs on this machine, one after the other.

    Raises ValueError for a job that an interrupted search left running.
    """
    for job in jobs:
        job.directory.mkdir(parents=True, exist_ok=True)
        # The job inherits the open file, and with it the lock, which is released when its last process ends.
        with open(job.directory / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"job {job.name} is still running from an interrupted search: wait for it, or end it"
                ) from None
            job.begin()
            change(job, RunState.RUNNING, on_change)
            try:
                status = process.run(job.command, job.log, timeout=timeout, keep_open=[lock.fileno()])
            except OSError as error:
                write_whole(job.log, f"OSError: {error}\n")
                status = -1
            ended = RunState.TIMEOUT if status is None else RunState.FAIL if status else RunState.COMPLETED
            change(job, ended, on_change)


def change(job: BatchJob, state: RunState, on_change: OnChange) -> None:
    """Move ``job`` to ``state``, or to the more exact state that its log shows, and report a change."""
    if state is RunState.FAIL and is_out_of_memory(job.output()):
        state = RunState.OOM
    if state is RunState.COMPLETED and len(_STEP.findall(job.output())) <= WARM_UP:
        state = RunState.FAIL
    if job.state is not state:
        job.become(state)
        on_change(job, state)


def read(job: BatchJob) -> Result:
    """Return the measurements of ``job``, or why it did not complete."""
    state, output = job.state, job.output()
    if state is RunState.TIMEOUT:
        return Result(job.name, state, problem=f"took too long: {job.log}")
    if state is not RunState.COMPLETED:
        return Result(job.name, state, problem=f"{reason(output, state is RunState.OOM)} ({job.log})")
    steps = [float(ms) / 1e3 for ms in _STEP.findall(output)[WARM_UP:]]
    megabytes = max((float(most) for most in _MEMORY.findall(output)), default=0.0)
    peaks = None
    if job.trace.exists():
        trace = json.loads(read_text(job.trace))
        peaks = tuple(trace["otherData"]["pipeline"]["peak_bytes"])
    return Result(job.name, state, median(steps), megabytes * 2**20 or None, peaks)


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
