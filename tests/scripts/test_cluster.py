"""Jobs on a real SLURM: a cluster of two nodes on this machine, with two ranks on each."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_pp_ext.cli import app, measure
from megatron_pp_ext.jobs import process
from megatron_pp_ext.jobs.command import training
from megatron_pp_ext.jobs.job import RunState
from tests.scripts.conftest import BOTH, FLAGS, PER_GPU, ROOT
from tests.support.slurm_cluster import Cluster, log_of, missing, running

pytestmark = [pytest.mark.wide, pytest.mark.skipif(bool(missing()), reason=str(missing()))]

RANKS = 4
MODEL = [*FLAGS, "--pipeline-model-parallel-size", str(RANKS)]
V_HALF = [*MODEL, "--pipeline-schedule", "v-half"]
SETTINGS = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "GPUS_PER_NODE": "2"}
NODES = ("--nodes=2", "--gpus-per-node=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
    assert not cluster.processes()


def submit(cluster, script, home, options, flags, **settings):
    """Submit a job from the folder ``home``; return its number."""
    tasks = ["--ntasks-per-node=2"] if script == PER_GPU else []  # a node here has no cores for more
    words = ["sbatch", "--parsable", *NODES, *tasks, *options, str(script), *flags]
    return cluster.run(*words, cwd=home, settings=SETTINGS | settings).strip()


def losses(log: str) -> list[tuple[int, str]]:
    """The steps that a log tells, in its order, with their losses."""
    told = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", log)
    return [(int(step), loss) for step, loss in told]


@BOTH
def test_a_job_saves_at_its_time_limit_goes_on_and_ends_with_a_rank(script, cluster, tmp_path):
    saved, logs = tmp_path / "saved", tmp_path / "logs of ranks"
    files = ["--save", str(saved), "--load", str(saved)]
    number = submit(cluster, script, tmp_path, ["--time=60"], ["--cpu", *V_HALF, *files], RANK_LOGS=str(logs))
    log = tmp_path / f"megatron-pp-{number}.out"

    def steps() -> int:
        return len(losses(log.read_text())) if log.exists() else 0

    cluster.wait_until(lambda: steps() >= 2, number, {"FAILED"})
    assert {rank: node for rank, (node, _) in cluster.ranks().items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    # SLURM signals ten minutes ahead of the limit, which is now.
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    cluster.wait_for(number, "PENDING")
    newest = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert newest == steps() >= 2, log_of(cluster.job(number))
    # SLURM lets a job that is queued again wait for two minutes.
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    cluster.wait_until(lambda: steps() > newest, number, {"FAILED"})

    _, rank = cluster.ranks()[RANKS - 1]
    rank.kill()
    cluster.wait_for(number, "FAILED")
    assert cluster.job(number)["Restarts"] == "1"
    assert not cluster.ranks()

    # One machine trains with the same losses, up to the first one behind the checkpoint.
    alone = tmp_path / "alone"
    assert process.run(training([*V_HALF, "--exit-interval", str(newest + 1)], RANKS, cpu=True), alone) == 0
    assert losses(log.read_text())[: newest + 1] == losses(alone.read_text())
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in range(RANKS)]
    assert all(texts)
    assert [losses(text) for text in texts if losses(text)] == [losses(log.read_text())]


@BOTH
def test_a_job_whose_time_limit_is_too_short_is_not_queued_again(script, cluster, tmp_path):
    """SLURM signals at once, and training, whatever the machine, has not begun."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    flags = ["--save", "saved", "--load", "saved"]
    number = submit(cluster, script, tmp_path, ["--time=5"], flags, SCRIPT="slow.py")
    cluster.wait_for(number, "FAILED")
    job = cluster.job(number)
    assert job["Restarts"] == "0"
    log = Path(job["StdOut"]).read_text()
    last = log.splitlines()[-1]
    assert last.startswith(f"job {number} is not queued again: it has trained and saved no step"), log
    assert "KeyboardInterrupt" not in log


def test_what_a_search_writes_trains(cluster: Cluster, tmp_path: Path) -> None:
    machine = json.loads((ROOT / "megatron_pp_ext/costs/systems/h100.json").read_text())
    (tmp_path / "two.json").write_text(json.dumps(machine | {"gpus_per_node": 2}))
    words = ["search", "--system", str(tmp_path / "two.json"), "--gpus", str(RANKS), "--schedules", "v-half"]
    found = CliRunner().invoke(app, [*words, "--top", "1", "--sbatch", str(tmp_path / "jobs"), "--", *MODEL])
    assert found.exit_code == 0, found.output
    (script,) = (tmp_path / "jobs").iterdir()
    extra = ("--cpu", "--exit-interval", "2")
    told = cluster.run("bash", str(script), *extra, cwd=tmp_path, settings=SETTINGS)
    number = told.split()[-1]
    cluster.wait_for(number, "COMPLETED")
    job = cluster.job(number)
    assert (job["NumNodes"], len(losses(Path(job["StdOut"]).read_text()))) == ("2", 2), log_of(job)


def test_a_search_measures_on_a_cluster(cluster, tmp_path, monkeypatch):
    """Jobs whose limit is shorter than the ten minutes of the batch script's own signal run to their end."""
    for name, value in (SETTINGS | cluster.variables).items():
        monkeypatch.setenv(name, value)
    good = ["--cpu", *V_HALF]
    candidates = {"good": good, "bad": [*good, "--pipeline-memory-limit", "2"]}
    results = measure.run(candidates, measure.RunPlace("slurm", RANKS, 2, None), tmp_path, 1, 300)
    assert results["good"].state is RunState.COMPLETED, (tmp_path / "good/log.txt").read_text()
    assert results["good"].step_seconds
    assert results["bad"].state is RunState.FAIL
    assert results["bad"].problem.startswith("megatron_pp_ext: --pipeline-memory-limit"), results["bad"]
