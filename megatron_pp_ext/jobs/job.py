"""Running candidates for a few steps, here or on a SLURM cluster, and reading back what they took.

A job has a folder, in which a file of one word says how far it is, so that a search that was interrupted
goes on where it was: what has ended stays, what was only started here runs again, and what is with SLURM is
waited for.  To run a job once more, delete its folder.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import IO

WARM_UP = 2
"""Steps of a run that do not count."""

GRACE_SECONDS = 40
"""torchrun gives its ranks 30 to end."""

_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_MEMORY = re.compile(r"memory \(MB\).*?max allocated: ([0-9.]+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|oom.kill", re.IGNORECASE)
_REASON = re.compile(r"(megatron_pp_ext: |\w*(Error|Exception)(: |$)|.*: error: )")
_TORCHRUN_FAILED = re.compile(
    r"^E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\)", re.MULTILINE
)
_MARKS = re.compile(r"[\^~=-]+")


class State(StrEnum):
    """How far a job is."""

    INIT = "init"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    OOM = "oom"
    TIMEOUT = "timeout"
    FAIL = "fail"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come of it."""
        return self in (State.COMPLETED, State.OOM, State.TIMEOUT, State.FAIL)


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a few training steps that log each of them.

    ``command`` is what to start: here as it is, on a cluster what follows ``sbatch``.  ``directory`` is the
    job's own, made when it is first run.
    """

    name: str
    command: tuple[str, ...]
    directory: Path

    @property
    def log(self) -> Path:
        """All that the run says."""
        return self.directory / "log.txt"

    @property
    def trace(self) -> Path:
        """Where a run with --pipeline-trace is to leave the recorder's findings."""
        return self.directory / "trace.json"

    @property
    def state(self) -> State:
        """What its file says; a job of another command in the same folder does not count."""
        try:
            same = (self.directory / "command").read_text(encoding="utf-8") == self._written
            return (
                State((self.directory / "state").read_text(encoding="utf-8").strip()) if same else State.INIT
            )
        except (FileNotFoundError, ValueError):
            return State.INIT

    def begin(self) -> None:
        """Make the folder, empty of what an earlier run left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("log.txt", "trace.json", "slurm_id"):
            (self.directory / name).unlink(missing_ok=True)
        (self.directory / "command").write_text(self._written, encoding="utf-8")
        self.become(State.INIT)

    def become(self, state: State) -> None:
        """Write ``state`` in one go."""
        unfinished = self.directory / "state.part"
        unfinished.write_text(f"{state}\n", encoding="utf-8")
        os.replace(unfinished, self.directory / "state")

    @property
    def _written(self) -> str:
        return shlex.join(self.command) + "\n"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job.

    ``step_seconds`` is the median step; ``device_bytes`` the most that any rank's allocator had, None where
    there is no device to ask; ``activation_bytes`` the recorder's peaks, rank by rank, where one was asked
    for.  ``problem`` is a line for a job that did not complete.
    """

    name: str
    state: State
    step_seconds: float | None = None
    device_bytes: float | None = None
    activation_bytes: tuple[int, ...] | None = None
    problem: str = ""


Heard = Callable[[Job, State], None]
"""Is told of each change of a job's state."""

Submit = Callable[[Sequence[Job], float, Heard], None]
"""Runs jobs that have not ended until they have, each for so many seconds at most."""


def run_all(
    jobs: Sequence[Job], submit: Submit, timeout: float, heard: Heard = lambda job, state: None
) -> dict[str, Result]:
    """Run what has not ended yet, and read all results, by name.

    A job that fails is told in its result, and the others go on.  ``timeout`` is in seconds, a job.
    Raises ValueError for two jobs of one name or folder.
    """
    for what in ("name", "directory"):
        if len({getattr(job, what) for job in jobs}) < len(jobs):
            raise ValueError(f"two jobs have the same {what}: give each its own")
    submit([job for job in jobs if not job.state.is_final], timeout, heard)
    return {job.name: read(job) for job in jobs}


def local(jobs: Sequence[Job], timeout: float, heard: Heard) -> None:
    """Run jobs on this machine, one after the other.

    Raises ValueError for a job that an interrupted search left running.
    """
    for job in jobs:
        job.directory.mkdir(parents=True, exist_ok=True)
        # The job inherits the open file, and with it the lock, which goes when its last process does.
        with open(job.directory / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"job {job.name} is still running from an interrupted search: wait for it, or end it"
                ) from None
            job.begin()
            change(job, State.RUNNING, heard)
            change(job, _run(job, timeout, lock), heard)


def _run(job: Job, timeout: float, lock: IO[str]) -> State:
    with job.log.open("wb") as log:
        try:
            process = subprocess.Popen(
                job.command, stdout=log, stderr=log, pass_fds=[lock.fileno()], start_new_session=True
            )
        except OSError as error:
            log.write(f"OSError: {error}\n".encode())
            return State.FAIL
        try:
            return State.FAIL if process.wait(timeout) else State.COMPLETED
        except subprocess.TimeoutExpired:
            return State.TIMEOUT
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what was started in a session of its own; torchrun, whose ranks have others, ends these itself."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def change(job: Job, state: State, heard: Heard) -> None:
    """Let ``job`` become ``state``, or what its log says is more exactly so, and say it."""
    if state is State.FAIL and _OUT_OF_MEMORY.search(_said(job)):
        state = State.OOM
    if state is State.COMPLETED and len(_STEP.findall(_said(job))) <= WARM_UP:
        state = State.FAIL
    if job.state is not state:
        job.become(state)
        heard(job, state)


def read(job: Job) -> Result:
    """What ``job`` took, or why it did not complete."""
    state, said = job.state, _said(job)
    steps = [float(ms) / 1e3 for ms in _STEP.findall(said)[WARM_UP:]]
    if state is not State.COMPLETED:
        return Result(job.name, state, problem=_problem(job, state, said))
    megabytes = max((float(most) for most in _MEMORY.findall(said)), default=0.0)
    peaks = None
    if job.trace.exists():
        trace = json.loads(job.trace.read_text(encoding="utf-8"))
        peaks = tuple(trace["otherData"]["pipeline"]["peak_bytes"])
    return Result(job.name, state, median(steps), megabytes * 2**20 or None, peaks)


def _problem(job: Job, state: State, said: str) -> str:
    if state is State.TIMEOUT:
        return f"took too long: {job.log}"
    # What torchrun adds is of every failure alike, but for a rank that was killed and could say nothing.
    own, code, *_ = [*_TORCHRUN_FAILED.split(said, maxsplit=1), ""]
    if state is State.OOM:
        own, code = "\n".join(filter(_OUT_OF_MEMORY.search, said.splitlines())), ""
    lines = [line for line in map(str.strip, own.splitlines()) if line and not _MARKS.fullmatch(line)]
    at = max((at for at, line in enumerate(lines) if _REASON.match(line)), default=len(lines) - 1)
    if code == "-9":
        told = "a rank was killed, as happens where the machine's memory ends"
    else:
        told = lines[at] if lines else "it said nothing"
    if told.endswith(("Error", "Exception")) and at:
        told = f"{lines[at - 1]}: {told}"
    return f"{told} ({job.log})"


def _said(job: Job) -> str:
    try:
        return job.log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
