"""A SLURM cluster of two nodes on this machine, in a folder of its own.

Both nodes are this machine, told apart by their ports and called by addresses of the loopback, so that no
name has to be made known to it. Nobody proves who he is (auth/none), which needs no munge. A GPU is a file.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from megatron_pp_ext.jobs import process

DAEMONS = (["slurmctld", "-D"], ["slurmd", "-D", "-N", "127.0.0.1"], ["slurmd", "-D", "-N", "127.0.0.2"])
PATIENCE = 600.0
"""Seconds that anything may take on the slowest machine."""

CONFIGURATION = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/control.pid
SlurmdParameters=config_overrides
FirstJobId={first}
MinJobAge=36000
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:2
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Say why there can be no cluster here; None if there can."""
    absent = sorted({command for command, *_ in DAEMONS if shutil.which(command) is None})
    if absent:
        return f"{' and '.join(absent)} are not installed (apt-get install slurm-wlm)"
    return None if os.geteuid() == 0 else "SLURM's daemons run jobs as root only"


class Cluster:
    """The commands of a cluster, and its processes, all of which have ``variables`` in their environment."""

    def __init__(self, folder: Path) -> None:
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, cwd: Path | None = None, settings: Mapping[str, str] | None = None) -> str:
        """Run a command, with ``settings`` in its environment; return its output, or raise its error."""
        environment = {**os.environ, **self.variables, **(settings or {})}
        run = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ChildProcessError(run.stderr)
        return run.stdout

    def is_idle(self) -> bool:
        """Whether both nodes are there and have nothing to do."""
        try:
            return self.run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"]
        except ChildProcessError:
            return False  # the controller does not answer yet

    def end(self) -> None:
        """End all processes that are left."""
        processes = self.processes()
        for member in processes:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(processes)

    def job(self, number: str) -> dict[str, str]:
        """Return SLURM's words for a job's state."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, state: str) -> None:
        """Wait until a job is in a state; AssertionError for one that ends in another."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"} - {state}
        self.wait_until(lambda: self.job(number)["JobState"] == state, number, ended)

    def wait_until(self, holds: Callable[[], object], number: str, ended: set[str] | None = None) -> None:
        """Wait until something holds; AssertionError if the job ends in a state of ``ended`` before."""
        end = time.monotonic() + PATIENCE
        while not holds():
            job = self.job(number)
            assert job["JobState"] not in (ended or {}) and time.monotonic() < end, log_of(job)
            time.sleep(0.5)

    def processes(self) -> list[psutil.Process]:
        """Return the cluster's daemons and all that its jobs have started."""
        return [
            member
            for member in psutil.process_iter()
            if self.variables.items() <= _environment(member).items()
        ]

    def ranks(self) -> dict[int, tuple[int, psutil.Process]]:
        """Return the node and the process of each rank of the jobs that run."""
        ranks_of_jobs: dict[int, tuple[int, psutil.Process]] = {}
        for member in self.processes():
            variables = _environment(member)
            # A rank's forks have its variables too, and so has the tee that keeps its log.
            if variables.get("RANK") and member.name() != "tee":
                ranks_of_jobs.setdefault(int(variables["RANK"]), (int(variables["SLURM_NODEID"]), member))
        return ranks_of_jobs


def log_of(job: Mapping[str, str]) -> str:
    """Return the state of a job and the end of its log."""
    return f"{job['JobState']}\n{Path(job['StdOut']).read_text()[-5000:]}"


def _environment(member: psutil.Process) -> dict[str, str]:
    try:
        return member.environ()
    except psutil.Error:
        return {}  # it has ended


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files are in ``folder``, and end it at the context's end."""
    with ExitStack() as free:
        sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in DAEMONS]
        ports = [server.getsockname()[1] for server in sockets]
    host, user = socket.gethostname(), getpass.getuser()
    # By a job's number the batch scripts choose the port at which its ranks meet.
    text = CONFIGURATION.format(host=host, user=user, ports=ports, folder=folder, first=os.getpid())
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").touch()
    gpus = [folder / f"gpu{number}" for number in range(2)]
    for gpu in gpus:
        gpu.touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    cluster = Cluster(folder)
    with ExitStack() as daemons:
        daemons.callback(cluster.end)
        logs = [folder / f"daemon-{number}.log" for number in range(len(DAEMONS))]
        started = [
            daemons.enter_context(
                process.started(command, daemons.enter_context(log.open("w")), cluster.variables)
            )
            for command, log in zip(DAEMONS, logs, strict=True)
        ]
        end = time.monotonic() + PATIENCE
        while not cluster.is_idle():
            runs = all(daemon.poll() is None for daemon in started) and time.monotonic() < end
            assert runs, "\n".join(log.read_text()[-2000:] for log in logs)
            time.sleep(0.5)
        yield cluster
