"""``mpp partition`` and ``mpp profile`` of a file: what they print, write and refuse."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from megatron_pp_ext.cli import app, partition
from megatron_pp_ext.jobs import process
from megatron_pp_ext.schedule.formats import profile
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer
from reference import vgg16

GPT = Profile.chain(
    [
        ProfiledLayer("embedding", 1, 1, 8, 0, 8, "E"),
        *(ProfiledLayer(f"layer {number}", 2, 4, 8, 0, 8, "t") for number in range(1, 7)),
        ProfiledLayer("output", 4, 8, 8, 0, 8, "L"),
    ]
)


@pytest.fixture
def mpp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg16.txt").write_text(vgg16.graph_txt())
    profile.write(GPT, tmp_path / "gpt.json")

    def run(*words):
        return CliRunner().invoke(app, " ".join(map(str, words)).split())

    return run


def test_numbers_as_json(mpp, tmp_path):
    result = mpp("partition vgg16.txt --workers 8 --bandwidth 3.125e9 --cost reference --json out.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["bottleneck_seconds"] == pytest.approx(0.09366112877714285)
    assert found["data_parallel_seconds"] == pytest.approx(0.16154709964)
    assert found["speedup"] == pytest.approx(0.16154709964 / 0.09366112877714285)
    assert found["noam"] == 2
    first, last = found["stages"]
    assert (first["first"], first["replicas"], last["last"], last["replicas"]) == (0, 7, 39, 1)
    assert first["layers"] + last["layers"] == [f"node{number}" for number in range(2, 42)]
    assert "speedup 1.72" in result.output


def test_links_are_the_default_and_keep_to_the_memory(mpp, tmp_path):
    """On a profile that `mpp profile` wrote, with a limit that counts versions and microbatches in flight."""
    assert mpp("profile vgg16.txt --json vgg16.json").exit_code == 0
    line = "partition vgg16.json --workers 8 --bandwidth 3e8 --json out.json"
    found = {}
    for options in ("", " --cost links", " --cost paper", " --cost links --memory 9e9"):
        result = mpp(line + options)
        assert result.exit_code == 0, result.output
        found[options] = json.loads((tmp_path / "out.json").read_text())
    assert found[""] == found[" --cost links"] != found[" --cost paper"]
    free, limited = found[""], found[" --cost links --memory 9e9"]
    assert max(stage["memory_bytes"] for stage in free["stages"]) > 9e9
    assert max(stage["memory_bytes"] for stage in limited["stages"]) <= 9e9
    assert limited["bottleneck_seconds"] > free["bottleneck_seconds"]


def test_levels_are_machines_in_machines(mpp, tmp_path):
    assert mpp("partition vgg16.txt --levels 4x25e9,2x3.1e9 --cost reference --json out.json").exit_code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["bottleneck_seconds"] == pytest.approx(0.12876775856)


def test_layout_is_all_that_is_printed(mpp):
    result = mpp("partition gpt.json --workers 4 --bandwidth 1e9 --straight --layout")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Et*2|t*2|t*2|L\n", "")


def test_flags_that_train_replicas(mpp):
    """The layout alone on stdout, and the flag for the replicas; all flags behind the table."""
    found = mpp("partition gpt.json --workers 5 --bandwidth 1e9 --layout")
    assert (found.exit_code, found.stdout) == (0, "Et*3|t*3L\n")
    assert found.stderr.endswith("add --pipeline-replicas 2-3\n")
    shown = mpp("partition gpt.json --workers 5 --bandwidth 1e9").stdout
    assert shown.endswith(
        "--pipeline-schedule pipedream --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout 'Et*3|t*3L' --pipeline-replicas 2-3\n"
    )
    assert "--pipeline-replicas" not in mpp("partition gpt.json --workers 2 --bandwidth 1e9").stdout
    assert "train it" not in mpp("partition vgg16.txt --workers 2 --bandwidth 1e9").stdout


MODEL = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 256 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 6"
)


def test_flags_go_from_the_partitioner_to_the_estimate(mpp, tmp_path):
    """As they are printed: schedule, stages, layout and replicas, on as many GPUs as there are workers."""
    flags = mpp("partition gpt.json --workers 5 --bandwidth 1e9 --flags").stdout
    words = shlex.split(f"estimate --system a100-80g --json found.json -- {MODEL} {flags}")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "pipedream on 5 x a100-80g, 2-3 replicas of the stages, 6 microbatches" in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["gpus"], len(found["ranks"])) == (5, 5)
    each = found["step_seconds"] / 6
    assert f"a microbatch every {each:.4g} s" in " ".join(result.output.split())
    first, last = found["ranks"][1], found["ranks"][2]
    assert first["versions"] / first["weights"] == 1 and last["versions"] == 0
    assert found["torchrun"][:3] == ["torchrun", "--nproc-per-node", "5"]


def test_profile_shows_and_converts(mpp, tmp_path):
    result = mpp("profile vgg16.txt --json vgg16.json")
    assert result.exit_code == 0, result.output
    assert "40 layers, a graph with 40 edges, 0.672535 s a microbatch" in result.output
    assert profile.read(tmp_path / "vgg16.json") == profile.read(tmp_path / "vgg16.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("partition nowhere.json --workers 2 --bandwidth 1e9", "nowhere.json: No such file"),
        ("partition vgg16.txt", "--workers is missing"),
        ("partition vgg16.txt --workers 2", "--bandwidth is missing"),
        ("partition vgg16.txt --workers 0 --bandwidth 1e9", "the number of workers is 0"),
        ("partition vgg16.txt --levels 4x25e9,2xnan", "the bandwidth is nan, but must be"),
        ("partition vgg16.txt --workers 2 --bandwidth 1e9 --memory 1e6", "raise it to at least"),
        ("partition vgg16.txt --levels 4x25e9 --bandwidth 1e9", "contradict each other"),
        ("partition vgg16.txt --levels 4x25e9,2 --workers 8", "--levels has '2'"),
        ("partition vgg16.txt --levels 4x25e9,2x3e9 --workers 4", "--workers is 4, but --levels"),
        ("partition vgg16.txt --workers 2 --bandwidth 1e9 --straight --layout", "has the symbol ''"),
        ("partition vgg16.txt --workers 2 --bandwidth 1e9 --straight --flags", "has the symbol ''"),
        ("partition gpt.json --workers 2 --bandwidth 1e15 --flags", "one stage with all workers"),
        ("partition gpt.json --workers 2 --bandwidth 1e9 --layout --flags", "leave one of them out"),
        ("profile nowhere.json", "nowhere.json: No such file"),
        ("profile gpt.json --script a.py", "--script a.py is for measuring"),
        ("profile gpt.json -- --save there", "--save would write a checkpoint"),
        ("profile gpt.json -- --micro-batch-size", "--micro-batch-size: expected one argument"),
    ],
)
def test_refusals(mpp, line, message):
    result = mpp(line)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("mpp: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_run_that_fails_leaves_the_profile_that_was_there(mpp, tmp_path, monkeypatch):
    def fail(words, log):
        assert str(file) not in words
        log.write_text("much\nValueError: too small\n")
        return 7

    file = tmp_path / "gold.json"
    file.write_text("precious")
    monkeypatch.setattr(process, "run", fail)
    result = mpp("profile", file, "--", "--num-layers", 2)
    assert result.exit_code == 2
    assert "ended with status 7 and no profile: ValueError: too small" in result.stderr
    assert str(file.with_suffix(".log")) in result.stderr
    assert file.read_text() == "precious"


def test_what_a_profile_does_not_need_is_filled_in(tmp_path):
    """Megatron takes the last of a flag that is given twice, so the user's own stay as they are."""
    words = partition.training_flags(
        tmp_path / "a.json", ["--num-layers", "2", "--seq-length", "64", "--lr=3"]
    )
    for flag in ("--micro-batch-size", "--train-iters", "--eval-interval", "--mock-data", "--tokenizer-type"):
        assert flag in words
    assert "--lr" not in words
    assert words[words.index("--max-position-embeddings") + 1] == "64"


def test_a_profile_needs_a_folder(mpp, tmp_path):
    result = mpp("profile", tmp_path / "nowhere" / "x.json", "--", "--num-layers", 2)
    assert "no such folder; make it first" in result.stderr
