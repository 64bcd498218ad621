"""Jobs: what becomes of each, what is read back, and how an interrupted search goes on."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_pp_ext.jobs import job as slurm
from megatron_pp_ext.jobs.job import WARM_UP, BatchJob, RunState, Slurm, local, run_all

STEP = "iteration {n}/ 5 | elapsed time per iteration (ms): {ms} | learning rate: 1 |"
MEMORY = (
    "[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {most} | reserved: 9"
)
GOOD = "\n".join(
    [*(STEP.format(n=n, ms=ms) for n, ms in enumerate((900.0, 800.0, 100.0, 140.0, 120.0), start=1)),
     MEMORY.format(rank=0, most=3.5), MEMORY.format(rank=1, most=7.25)]
)  # fmt: skip
WARMED_UP = "\n".join(STEP.format(n=n, ms=900.0) for n in range(WARM_UP))
"""A run without a step to measure."""


def job(folder: Path, name: str, script: str) -> BatchJob:
    return BatchJob(name, ("bash", "-c", script), folder / name)


def test_a_failing_job_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    trace = '{"otherData": {"pipeline": {"peak_bytes": [5, 3]}}}'
    jobs = [
        job(tmp_path, "bad", "echo starting; echo 'ValueError: 7 heads are not divisible by 2' >&2; exit 1"),
        job(tmp_path, "full", "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB'; exit 1"),
        job(tmp_path, "short", f"cat <<'E'\n{WARMED_UP}\nE"),
        BatchJob("absent", ("/no/such/program",), tmp_path / "absent"),
        job(tmp_path, "good", f"cat <<'E'\n{GOOD}\nE\necho '{trace}' > {tmp_path}/good/trace.json"),
    ]
    changes: list[tuple[str, RunState]] = []
    results = run_all(jobs, local, 60.0, lambda job, state: changes.append((job.name, state)))
    states = [result.state for result in results.values()]
    assert states == ["fail", "oom", "fail", "fail", "completed"]
    assert results["bad"].problem.startswith("ValueError: 7 heads are not divisible by 2")
    assert "Tried 2 GiB" in results["full"].problem
    assert "/no/such/program" in results["absent"].problem
    good = results["good"]
    # The first two steps warm up; the most that any rank allocated; the recorder's peaks.
    assert (good.step_seconds, good.device_bytes, good.activation_bytes) == (0.12, 7.25 * 2**20, (5, 3))
    assert changes[:2] == [("bad", RunState.RUNNING), ("bad", RunState.FAIL)]
    assert [(tmp_path / name / "state").read_text() for name in ("full", "good")] == ["oom\n", "completed\n"]


def test_a_job_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "slow", "sleep infinity"), job(tmp_path, "next", "true")]
    slow, following = run_all(jobs, local, 0.5).values()
    assert slow.state == "timeout"
    assert following.state.is_final


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    """What has ended stays, what was cut off runs again, and so does what was given another command."""
    script = f"echo run >> {tmp_path}/{{0}}.runs; cat <<'E'\n{GOOD}\nE"
    jobs = [job(tmp_path, name, script.format(name)) for name in ("done", "cut", "changed")]
    run_all(jobs, local, 60.0)
    (tmp_path / "cut" / "state").write_text("running\n")
    jobs[2] = job(tmp_path, "changed", script.format("changed") + "\ntrue")
    results = run_all(jobs, local, 60.0)
    runs = {name: (tmp_path / f"{name}.runs").read_text().count("run") for name in ("done", "cut", "changed")}
    assert runs == {"done": 1, "cut": 2, "changed": 2}
    assert all(result.state is RunState.COMPLETED for result in results.values())


def test_a_killed_search_does_not_run_a_job_twice_at_once(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "from pathlib import Path; from megatron_pp_ext.jobs.job import *;"
        f"run_all([BatchJob('a', ('bash', '-c', 'echo $$ > {started}; exec sleep 60'), Path('{tmp_path}/a'))"
        "], local, 60)"
    )
    search = subprocess.Popen([sys.executable, "-c", code])
    while not (started.exists() and started.read_text().strip()):
        assert search.poll() is None
        time.sleep(0.02)
    search.kill()
    search.wait()
    try:
        with pytest.raises(ValueError, match="job a is still running from an interrupted search"):
            run_all([job(tmp_path, "a", "true")], local, 1.0)
    finally:
        os.kill(int(started.read_text()), 9)


def test_what_an_earlier_run_left_is_gone(tmp_path: Path) -> None:
    """A job that is given another command, here one without a trace, reports nothing of before."""
    trace = '{"otherData": {"pipeline": {"peak_bytes": [5, 3]}}}'
    with_trace = job(tmp_path, "one", f"cat <<'E'\n{GOOD}\nE\necho '{trace}' > {tmp_path}/one/trace.json")
    assert run_all([with_trace], local, 60.0)["one"].activation_bytes == (5, 3)
    without = job(tmp_path, "one", f"cat <<'E'\n{GOOD}\nE")
    assert run_all([without], local, 60.0)["one"].activation_bytes is None


def test_two_jobs_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two jobs have the same name: give each its own"):
        run_all([job(tmp_path, "a", "true"), job(tmp_path / "b", "a", "true")], local, 1.0)


STAND_IN = r"""#!PYTHON -ISs
# A cluster whose jobs go on by a state each time that somebody asks.
import os, sys
from pathlib import Path

home, name, words = Path(os.environ["CLUSTER"]), Path(sys.argv[0]).name, sys.argv[1:]
with open(home / "calls", "a") as calls:
    print(name, *words, file=calls)


def after(flag):
    return next(w for at, w in enumerate(words) if words[at - 1] == flag or w.startswith(flag + "="))


if name == "sbatch":
    if "refused" in words:
        sys.exit("sbatch: error: invalid partition")
    number = len(list(home.glob("*.job"))) + 1
    kind = words[-1]
    states = {"good": "PENDING RUNNING gone COMPLETED", "full": "RUNNING FAILED", "killed": "OUT_OF_MEMORY",
              "late": "RUNNING TIMEOUT", "cancelled": "gone CANCELLED+by+1000", "lost": "gone " * 9}[kind]
    (home / f"{number}.job").write_text(states)
    log = Path(words[words.index("--output") + 1])
    log.write_text({"good": (home / "good").read_text(), "lost": (home / "good").read_text(),
                    "full": "CUDA out of memory"}.get(kind, "nothing"))
    print(f"{number};cluster")
else:
    for number in words[words.index("--jobs") + 1].split(","):
        states = (home / f"{number}.job").read_text().split()
        now = states[0] if states else "gone"
        if name == "squeue":
            if now not in ("gone", "COMPLETED") and "+" not in now:
                print(number, now)
                (home / f"{number}.job").write_text(" ".join(states[1:] or states))
        elif now == "gone":
            (home / f"{number}.job").write_text(" ".join(states[1:]))
        else:
            print(number, now.replace("+", " "), sep="|")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins for SLURM's commands, which also note how they were called."""
    home = tmp_path / "cluster"
    home.mkdir()
    (home / "good").write_text(GOOD)
    for name in ("sbatch", "squeue", "sacct"):
        (home / name).write_text(STAND_IN.replace("PYTHON", sys.executable))
        (home / name).chmod(0o755)
    monkeypatch.setenv("CLUSTER", str(home))
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return home


def test_slurm(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "UNKNOWN_AT_MOST", 2)
    kinds = {
        "good": RunState.COMPLETED,
        "full": RunState.OOM,
        "killed": RunState.OOM,
        "late": RunState.TIMEOUT,
        "cancelled": RunState.FAIL,
        "refused": RunState.FAIL,
        "lost": RunState.COMPLETED,
    }
    jobs = [BatchJob(kind, ("--nodes", "2", "train.sbatch", kind), tmp_path / kind) for kind in kinds]
    changes: list[tuple[str, RunState]] = []
    results = run_all(jobs, Slurm(poll_seconds=0), 90.0, lambda job, state: changes.append((job.name, state)))
    assert {kind: result.state for kind, result in results.items()} == kinds
    assert [state for name, state in changes if name == "good"] == ["pending", "running", "completed"]
    assert results["good"].step_seconds == 0.12
    assert "invalid partition" in results["refused"].problem
    submitted = re.findall(r"^sbatch (.*)$", (cluster / "calls").read_text(), re.MULTILINE)
    assert f"--time 2 --output {tmp_path}/good/log.txt --nodes 2 train.sbatch good" in submitted[0]


def test_a_job_that_is_forgotten_now_and_then_is_waited_for(cluster, tmp_path, monkeypatch):
    """Only queries in a row for which nobody knows it are an end."""
    monkeypatch.setattr(slurm, "UNKNOWN_AT_MOST", 2)
    flaky = BatchJob("flaky", ("train.sbatch", "flaky"), tmp_path / "flaky")
    flaky.begin()
    flaky.become(RunState.PENDING)
    (flaky.directory / "slurm_id").write_text("1")
    (cluster / "1.job").write_text("gone gone RUNNING gone gone RUNNING gone TIMEOUT")
    assert run_all([flaky], Slurm(poll_seconds=0), 90.0)["flaky"].state is RunState.TIMEOUT


def test_a_search_finds_its_slurm_jobs_again(cluster: Path, tmp_path: Path) -> None:
    again = BatchJob("good", ("train.sbatch", "good"), tmp_path / "good")
    again.begin()
    again.become(RunState.PENDING)
    (again.directory / "slurm_id").write_text("1")
    (cluster / "1.job").write_text("RUNNING COMPLETED")
    again.log.write_text(GOOD)
    assert run_all([again], Slurm(poll_seconds=0), 90.0)["good"].step_seconds == 0.12
    assert "sbatch" not in (cluster / "calls").read_text()


def test_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no sbatch here: run where SLURM is"):
        run_all([BatchJob("a", ("train.sbatch",), tmp_path / "a")], Slurm(), 60.0)
