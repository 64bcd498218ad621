"""mpp rehearse: the flags it makes of a job's, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_pp_ext.cli.rehearse import environment, rehearsal_flags
from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.jobs import process
from megatron_pp_ext.jobs.failure import reason
from megatron_pp_ext.planner import described
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file, csv_file, rehearsal_file
from megatron_pp_ext.schedule.formats.rehearsal_file import RankRehearsal
from megatron_pp_ext.schedule.simulate import peak_messages

EXPERTS = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4"


def test_a_job_s_flags() -> None:
    job = (
        "--pipeline-model-parallel-size 4 --save out --load=out --train-iters 1000 --fp16 --data-path a "
        "--tensorboard-dir b --swiglu"
    )
    made = rehearsal_flags(job.split(), 4, Path("0.json"))
    assert shlex.join(made).startswith(
        "--pipeline-model-parallel-size 4 --train-iters 1000 --fp16 --data-path a"
    )
    assert not {"--save", "--load=out", "out", "--tensorboard-dir", "b", "--mock-data"} & set(made)
    assert made[made.index("--exit-interval") + 1] == "5"
    # fp16 begins with steps that overflow, which would leave the optimizer without its state.
    # Nor does Megatron check them for NaN where the scale adapts itself.
    unchecked = ["--no-check-for-nan-in-loss-and-grad"]
    assert made[-4:] == ["--fake-process-group", "--loss-scale", "1", *unchecked]
    fixed = rehearsal_flags([*job.split(), "--loss-scale=8"], 4, Path("0.json"))
    assert fixed[-3:] == made[-4:-1]


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("--pipeline-model-parallel-size 4", 4),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --context-parallel-size 2", 16),
        ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 8", 16),
        (f"{EXPERTS} --tensor-model-parallel-size 2", 16),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 8),
    ],
)
def test_the_smallest_job(flags: str, world: int) -> None:
    assert smallest_world(described.read(flags.split(), None).job) == world


def test_where_a_rank_is() -> None:
    words = ["--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2"]
    for more, place in (([], "48"), (["--use-tp-pp-dp-mapping"], "6")):
        asked = described.read([*words, *more], None).job
        assert environment(asked, 3, 64)["RANK"] == place


def test_the_reason_of_a_failure() -> None:
    assert reason("a\nmegatron_pp_ext: no\nTraceback:\n  b\n") == "megatron_pp_ext: no"
    assert reason("a\n\nValueError: b\n") == "ValueError: b"
    assert reason("") == "it printed nothing"


def stand_in(schedule, started: list[list[int]], **changed: object):
    """Return what writes the files of ranks that took 1 s for each F and 2 s for each B."""
    measured = {
        "schedule": schedule.name, "digest": schedule.digest, "layers": (1,) * schedule.ranks,
        "stages": (StageCosts(1.0, 1.0, 1.0, 2.0**20),), "collectives": (), "message_bytes": 8,
        "outside_seconds": 0.5, "peak_activation_bytes": 7 * 2**20, "weight_bytes": 2**20,
        "gradient_bytes": 2 * 2**20, "optimizer_bytes": 4 * 2**20, **changed,
    }  # fmt: skip

    def run_together(commands: dict, logs: dict) -> None:
        started.append(list(commands))
        for rank, (words, variables) in commands.items():
            assert variables["RANK"] == str(rank)
            file = Path(words[words.index("--rehearse-pipeline") + 1])
            csv_file.write(schedule, file.with_suffix(".csv"))
            rehearsal_file.write(RankRehearsal(rank=rank, **measured), file)

    return run_together


def test_what_it_shows_and_writes(mpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = catalog.build("1f1b", 3, 6)
    started: list[list[int]] = []
    monkeypatch.setattr(process, "run_together", stand_in(schedule, started))
    files = {name: tmp_path / f"{name}.json" for name in ("json", "costs", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    result = mpp(
        "rehearse", "--ranks", "0,1", "--at-once", "2", *options, "--", "--pipeline-model-parallel-size", "3"
    )
    assert result.exit_code == 0, result.output
    assert started == [[0, 1]]
    expected = 3 * (6 + 3 - 1)
    assert f"a step takes {expected + 0.5} s" in result.output
    numbers = json.loads(files["json"].read_text())
    assert numbers["disturbed"] is None
    assert (numbers["step_seconds"], numbers["pipeline_seconds"]) == (expected + 0.5, expected)
    kept = [(rank["total"] - rank["messages"]) / 2**20 for rank in numbers["ranks"]]
    assert kept == [14, 14, 8]  # the last keeps one microbatch
    assert [rank["messages"] for rank in numbers["ranks"]] == [8 * n for n in peak_messages(schedule)]
    assert [rank["rehearsed_on"] for rank in numbers["ranks"]] == [0, 1, 1]
    costs = costs_file.read(files["costs"])
    assert costs == Costs((StageCosts(1.0, 1.0, 1.0, 2.0**20),) * 3, 0.0, 8)
    assert costs.sizes["tensor_model_parallel_size"] == 1
    opened = mpp("trace", files["trace"])
    assert opened.exit_code == 0, opened.output


@pytest.mark.parametrize("accepted", [False, True])
def test_seconds_from_a_busy_machine(accepted, mpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are shown all the same; seconds only where they are wanted, and files too."""
    schedule = catalog.build("1f1b", 2, 4)

    monkeypatch.setattr(
        process, "run_together", stand_in(schedule, [], step_seconds=(15.0, 15.0), waited=0.5)
    )
    files = {name: tmp_path / f"{name}.json" for name in ("json", "costs", "trace")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    options += ["--accept-noise"] if accepted else []
    result = mpp("rehearse", *options, "--", "--pipeline-model-parallel-size", "2")
    assert "MiB on rank" in result.stdout
    assert "waited for a processor for up to 50.0%" in " ".join(result.stdout.split())
    assert ("a step takes" in result.stdout) is accepted
    assert [file.exists() for file in files.values()] == [accepted] * 3
    assert result.exit_code == (0 if accepted else 2)
    if accepted:
        assert "rank 0 waited for a processor" in json.loads(files["json"].read_text())["disturbed"]
    assert ("mpp: the seconds are not to be believed: rank 0 waited" in result.stderr) is not accepted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-- --num-layer 4", "--num-layer is none of Megatron's: did you mean '--num-layers'?"),
        ("-- --num-layers 4", "needs a pipeline, got --pipeline-model-parallel-size 1; set it to 2 or more"),
        ("-- --pipeline-model-parallel-size two", "invalid int value: 'two'"),
        ("--ranks 4 -- --pipeline-model-parallel-size 4", "--ranks got '4'"),
        ("--iterations 1 -- --pipeline-model-parallel-size 4", "--iterations wants 2 or more"),
        ("--at-once 0 -- --pipeline-model-parallel-size 4", "--at-once 1 or more"),
        ("--world-size 6 -- --pipeline-model-parallel-size 4", "--world-size 6 is not a multiple of 4"),
        ("--system h1000 -- --pipeline-model-parallel-size 4", "--system h1000 is neither a file nor known"),
        ("", "no model: give --model NAME"),
    ],
)
def test_refusals(line: str, message: str, mpp) -> None:
    result = mpp("rehearse", *line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
