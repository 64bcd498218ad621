"""mpp verify: its verdict and exit status, from runs that only write records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import Result

from megatron_pp_ext.jobs import process
from megatron_pp_ext.schedule.formats import run_record

PP2 = "--pipeline-model-parallel-size 2"
JOB = (*f"{PP2} --num-layers 4 --hidden-dropout 0.1 --pipeline-schedule v-half".split(),)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """The command lines that were started; stock's losses are 4, the schedule's 4.5."""
    started: list[Sequence[str]] = []

    def run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        started.append(command)
        log.write_text("ValueError: no such thing\n")
        if "--no-such-flag" in command:
            return 1
        if "--verify-pipeline" in command:
            folder = Path(command[command.index("--verify-pipeline") + 1])
            loss = 4.5 if "--pipeline-schedule" in command else 4.0
            run_record.write(folder, 0, [{"lm loss": loss}] * 3, [0.5] * 3)
        return 0

    monkeypatch.setattr(process, "run", run)
    monkeypatch.chdir(tmp_path)
    return started


def test_a_difference_fails(mpp: Callable[..., Result], runs: list[Sequence[str]]) -> None:
    result = mpp("verify", "--cpu", "--", *JOB)
    assert result.exit_code == 1, result.output
    assert "largest difference of a loss: 0.111 in step 1" in result.output
    assert "differs: v-half" in result.output
    assert "log: runs/verify/stock.log" in result.output
    assert len(runs) == 3
    assert all("megatron_pp_ext.pretrain_gpt" in command for command in runs)


def test_dropout_is_expected_to_differ(mpp: Callable[..., Result], runs: list[Sequence[str]]) -> None:
    result = mpp("verify", "--cpu", "--keep-dropout", "--repeat", "--", *JOB)
    assert result.exit_code == 1, result.output
    assert result.output.startswith("A difference is expected: with dropout")
    assert "This was expected" in result.output
    assert len(runs) == 4


def test_a_script_of_the_user(mpp: Callable[..., Result], runs: list[Sequence[str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    mpp("verify", "--cpu", "--ranks", 4, "train.py", "--", *JOB)
    for command in runs:
        assert command[command.index("--nproc-per-node") + 1] == "4"
        assert list(command[command.index("--cpu") :][:2]) == ["--cpu", "train.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "add --pipeline-schedule NAME"),
        (("--", "--pipeline-schedule", "v-half"), "set --pipeline-model-parallel-size to 2"),
        (("--ranks", "3", "--", *JOB), "--ranks 3 is not a multiple of 2"),
        (("--steps", "0", "--", *JOB), "--steps wants 1 or more"),
        (("nowhere.py", "--", *JOB), "nowhere.py is no file"),
        (("--checkpoint", "nowhere", "--", *JOB), "holds no checkpoint"),
    ],
)
def test_bad_input(mpp, runs, words, message):
    result = mpp("verify", "--cpu", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not runs


def test_a_run_that_fails_is_named_with_its_log(mpp, runs, tmp_path):
    result = mpp("verify", "--cpu", "--", *JOB, "--no-such-flag")
    assert result.exit_code == 2, result.output
    log = tmp_path / "runs/verify/checkpoint.log"
    assert f"the run checkpoint ended with status 1: ValueError: no such thing ({log})" in result.stderr
