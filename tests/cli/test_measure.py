"""The jobs that a search makes of its candidates, and how they are ranked."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_pp_ext.cli import measure
from megatron_pp_ext.cli.measure import RunPlace
from megatron_pp_ext.jobs.job import Result, RunState

FLAGS = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]


def test_a_local_job_is_a_short_run_of_torchrun(tmp_path: Path) -> None:
    flags = [*FLAGS, "--save", "of the real run", "--load=of the real run"]
    job = measure._job("a", flags, RunPlace("local", 2, 8, None), tmp_path / "a", 5)
    words = list(job.command)
    assert "of the real run" not in " ".join(words)
    started = "-m torch.distributed.run --standalone --nproc-per-node 2"
    assert (words[0], " ".join(words[1:6])) == (sys.executable, started)
    assert words[words.index("--exit-interval") + 1] == "7"
    assert words[words.index("--log-interval") + 1] == "1"


def test_a_job_has_the_variable_that_megatron_asserts(tmp_path: Path) -> None:
    """One hardware queue under tensor or context parallelism, save where another feature needs more."""
    for size in ("--tensor-model-parallel-size", "--context-parallel-size"):
        job = measure._job("a", [*FLAGS, f"{size}=2"], RunPlace("local", 4, 8, None), tmp_path / "a", 5)
        assert job.command[:3] == ("env", "CUDA_DEVICE_MAX_CONNECTIONS=1", sys.executable)
    assert measure.environment([size, "2", "--overlap-moe-expert-parallel-comm"]) == {}
    assert measure.environment([size, "1"]) == {}


def test_a_slurm_job_is_what_follows_sbatch(tmp_path: Path) -> None:
    job = measure._job("a", FLAGS, RunPlace("slurm", 16, 8, Path("train.py")), tmp_path / "a", 5)
    at = job.command.index(measure.BATCH_SCRIPT)
    assert job.command[:3] == ("--nodes", "2", "--gpus-per-node=8")
    assert "--export=ALL,SCRIPT=train.py,GPUS_PER_NODE=8" in job.command[:at]
    assert list(job.command[at + 1 : at + 5]) == FLAGS
    own = measure._job("a", FLAGS, RunPlace("slurm", 16, 8, None), tmp_path / "a", 5)
    assert "--export=ALL,SCRIPT=,GPUS_PER_NODE=8" in own.command


def test_measure_runs_them_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torchrun that fails for one of them."""
    monkeypatch.setattr(measure, "devices", lambda: 2)
    log = "".join(f"elapsed time per iteration (ms): {ms}.0\n" for ms in (9, 9, 4, 6, 5))
    script = 'echo run >> "$0.runs"; [[ $* == *bad* ]] && { echo "ValueError: bad"; exit 1; }; printf "$1"'
    monkeypatch.setattr(
        measure, "training", lambda flags, *_: ["bash", "-c", script, str(tmp_path / "x"), log, *flags]
    )
    candidates = {"bad": [*FLAGS, "--bad"], "good": FLAGS}
    for _ in range(2):  # the second time everything has ended already
        results = measure.run(candidates, RunPlace("local", 2, 8, None), tmp_path, 3, 60)
        assert [result.name for result in measure.ranked(results)] == ["good", "bad"]
        assert results["good"].step_seconds == 0.005
        assert (results["bad"].state, results["bad"].problem[:15]) == (RunState.FAIL, "ValueError: bad")
    assert (tmp_path / "x.runs").read_text() == "run\nrun\n"


def test_the_table_has_errors_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    results = {
        "slow": Result("slow", RunState.COMPLETED, 4.0, 3e9),
        "none": Result("none", RunState.OOM, problem="out of memory"),
        "quick": Result("quick", RunState.COMPLETED, 2.0, 1e9),
    }
    measure.show(results, {"slow": 3.0, "none": 1.0, "quick": 2.5})
    shown = capsys.readouterr().out
    assert shown.index("quick") < shown.index("slow") < shown.index("none")
    for text in ("-25.0%", "+25.0%", "oom", "out of memory", "3.00"):
        assert text in shown


def test_a_search_ranks_its_best_by_measurement(mpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in the reverse order of what was estimated; one fails."""
    requested: list[Sequence[str]] = []

    def run(
        candidates: Mapping[str, Sequence[str]], where: RunPlace, folder: Path, steps: int, timeout: float
    ):
        assert (where.gpus, folder, steps, timeout) == (2, tmp_path / "runs", 7, 60.0)
        requested.extend(candidates.values())
        first, *others = candidates
        results = {name: Result(name, RunState.COMPLETED, 9.0 - at) for at, name in enumerate(others)}
        return results | {first: Result(first, RunState.OOM, problem="out of memory")}

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "devices", lambda: 2)
    model = tmp_path / "model.json"
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model.write_text(json.dumps({**sizes, "seq_length": 64, "bf16": True}))
    found = tmp_path / "found.json"
    options = ["--measure", "--jobs", tmp_path / "runs", "--steps", 7, "--timeout", 60, "--json", found]
    result = mpp("search", "--gpus", 2, "--top", 3, "--global-batch-size", 8, "--model", model, *options)
    assert result.exit_code == 0, result.output
    numbers = json.loads(found.read_text())
    estimated = [one["name"] for one in numbers["best"]]
    assert [one["name"] for one in numbers["measured"]] == [estimated[2], estimated[1], estimated[0]]
    assert "out of memory" in result.output
    assert all("--num-layers" in flags and "--micro-batch-size" in flags for flags in requested)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (RunPlace("cloud", 2, 8, None), "--submit got 'cloud', but takes local or slurm"),
        (RunPlace("local", 4096, 8, None), "would run 4096 ranks here, where .* set --submit slurm"),
    ],
)
def test_refusals(where: RunPlace, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        measure.run({"a": FLAGS}, where, tmp_path, 3, 60)
    with pytest.raises(ValueError, match="--steps wants 1 or more"):
        where.check(0, 60)
