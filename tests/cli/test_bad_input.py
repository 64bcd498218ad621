"""One line on stderr, exit code 2, no traceback, nothing on stdout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext.costs import system

PIPELINE = "--pipeline-model-parallel-size 4"
LAYER = {"forward_seconds": 1, "backward_seconds": 1, "activation_bytes": 1, "parameter_bytes": 1}
STAGE = {"forward": 1, "input_gradient": 1, "weight_gradient": 1}


def refusal(result):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("mpp: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule v-halv", "did you mean 'v-half'"),
        ("schedule auto", "look at flex with --memory-limit"),
        ("schedule csv:A_b.csv", "look at it with mpp simulate A_b.csv"),
        ("schedule seq1f1b", "is not offered"),
        ("schedule pipedream", "train with --pipeline-schedule pipedream"),
        ("schedule v-half -p 1", "at least 2"),
        ("schedule v-half -m 0", "at least 1"),
        ("schedule v-half -p many", "give a whole number, such as 4"),
        ("schedule v-half --f many", "give a number"),
        ("schedule v-half --chunks 3", "leave chunks out"),
        ("schedule v-half --bogus", "No such option"),
        ("schedule v-half --tensor-model-parallel-size 8", "No such option"),
        ("estimate --model a --pipeline-schedule v-half", "put it after --, as in mpp estimate ... -- --"),
        ("search --tensor-model-parallel-size=8", "--tensor-model-parallel-size is a flag of training: put"),
        ("rehearse --tensor-model-paralel-size 8", "after --: did you mean '--tensor-model-parallel-size'"),
        ("estimate --sistem h100", "No such option: --sistem"),
        ("search --model llama3-8b -- --gpus=8", "--gpus is an option of mpp search: put it before --"),
        ("estimate --model llama3-8b -- --gpus 8", "--gpus is none of Megatron's"),
        ("search --model llama3-8b --global-batch-size 8 --memory 60", "in 60GB"),
        ("partition a --workers 2 --bandwidth 1GB --memory much", "is much, but must"),
        ("schedule v-half --trials 9", "--trials is for flex"),
        ("schedule", "Missing argument"),
        ("schedul", "Did you mean 'schedule'?"),
        ("xyz", "mpp --help lists them"),
        ("measure", "Look at mpp calibrate (this machine)"),
        ("schedule dualpipe", "use dualpipe-v"),
        ("schedule dualpip", "did you mean 'dualpipe-v'"),
        ("schedule v-half --png nowhere/a.png", "no such folder; make it first"),
        ("schedule v-half --trace nowhere/a.json", "no such folder; make it first"),
        ("schedule v-half --f 0", "--f is 0, but must be a finite number above 0"),
        ("schedule v-half --hop inf", "--hop is inf, but must be a finite number 0 or more"),
        ("schedule v-half --memory-limit 1", "is for flex"),
        ("schedule flex", "flex needs --memory-limit"),
        ("schedule flex --memory-limit 0", "--memory-limit is 0, but a rank's memory is a number above 0"),
        ("schedule flex --memory-limit inf", "--memory-limit is inf, but a rank's memory"),
        ("schedule flex --memory-limit half", "'half' is no number; give a fraction of what 1f1b keeps"),
        ("schedule flex --memory-limit 80GB", "Bytes are for mpp search --memory"),
        ("schedule flex --memory-limit 0.1", "raise it to at least 0.25"),
        ("schedule flex -p 1 --memory-limit 1", "flex got 1 rank"),
        ("schedule flex --chunks 999999999 --memory-limit 1", "actions, but at most 2,000,000"),
        ("search --gpus 99999999999 --model gpt3-175b --global-batch-size 8", "--gpus is 99999999999"),
        ("search --gpus 8 --model llama3-8b --global-batch-size 9999999", "--global-batch-size 9999999 is"),
        (f"estimate --model llama3-8b -- {PIPELINE} --global-batch-size 9999999", "actions, but at most"),
        (f"estimate --model llama3-8b -- {PIPELINE} --pipeline-model-parallel-layout Et*{10**9}|L", "16,384"),
        ("schedule flex --chunks 0 --memory-limit 1", "0 chunks each"),
        ("schedule v-half --png a.svg", "--png got a.svg: end the file's name in .png"),
        ("schedule v-half --svg a", "--svg got a: end the file's name in .svg"),
        ("schedule v-half --costs nowhere.json", "nowhere.json: No such file or directory; correct the path"),
        ("schedule v-half --costs a.json --f 2", "--costs and --f contradict each other"),
        ("schedule v-half --costs a.json --chunk-units", "--costs and --chunk-units contradict each other"),
        ("schedule v-half --shared-vocabulary", "give --output-layer"),
        ("schedule v-half --output-layer -1", "--output-layer is -1, but must be"),
        ("schedule flex --memory-limit 0.5 --shared-vocabulary", "not for flex"),
        ("schedule 1f1b --offload 0.5", "--offload is given without --copy"),
        ("schedule 1f1b --copy 0.5", "--copy is given without --offload"),
        ("schedule 1f1b --offload 1.5 --copy 0.5", "--offload is 1.5: give a share above 0"),
        ("schedule 1f1b --offload most --copy 0.5", "--offload is most: give a share above 0"),
        ("schedule 1f1b --offload 1 --copy -1", "--copy is -1, but must be 0 or more"),
        ("simulate nowhere.csv", "nowhere.csv: No such file"),
        ("simulate a.csv", "a.csv: row 0, cell 1: 'what' is not an action"),
        ("compare -p 1", "at least 2"),
        ("compare -m 0", "at least 1"),
        ("compare --hop -1", "--hop is -1"),
        ("schedule v-half --f 1e308", "--f is 1e+308, but must be at most 1e+100: lower it"),
        ("compare -p 2 -m 3 --f 1e308 --i 1e308 --w 1e308", "--f is 1e+308, but must be at most 1e+100"),
        ("trace nowhere.json", "nowhere.json: No such file or directory; correct the path"),
    ],
)
def test_refusals(line, message, mpp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("0F0,what,0B0\n1F0,1B0\n")
    assert message in refusal(mpp(*line.split()))


HOSTILE = "[/]\x1b[31m\r\n$(touch pwned)"
"""Markup, an escape sequence, a line break and a command, as a name in somebody else's file."""


@pytest.mark.parametrize(
    ("line", "content", "message"),
    [
        (
            "estimate --model llama3-8b --system a.json",
            {"name": HOSTILE},
            "cannot be printed: leave them out",
        ),
        ("estimate --model a.json", {"num_layers": 4, "spec": [HOSTILE]}, "spec: "),
        ("estimate --model a.json", {HOSTILE: 4}, "is unknown"),
        ("partition a.json --workers 2 --bandwidth 1e9", {"layers": [LAYER | {"name": HOSTILE}]}, "printed"),
        ("schedule 1f1b -p 2 --costs a.json", {"stages": [STAGE], HOSTILE: 1}, "is unknown"),
        ("simulate a.csv --costs a.json", {"stages": [STAGE | {"forward": 1e308}]}, "at most 1e+100"),
    ],
)
def test_names_of_other_people_reach_no_terminal(line, content, message, mpp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described = json.loads(system.read("h100").to_json()) if "--system" in line else {}
    Path("a.json").write_text(json.dumps(described | content))
    Path("a.csv").write_text("0F0,0B0\n")
    refused = refusal(mpp(*line.split()))
    assert message in refused
    assert refused.rstrip("\n").isprintable()


def test_what_looks_like_markup_is_text(mpp, tmp_path):
    mpp("schedule", "1f1b", "-p", 2, "-m", 2, "--trace", tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    content["otherData"]["pipeline"]["schedule"] = "[/] $x_$"
    (tmp_path / "a.json").write_text(json.dumps(content))
    shown = mpp("trace", tmp_path / "a.json", "--svg", tmp_path / "a.svg")
    assert shown.exit_code == 0, shown.output
    assert "a: [/] $x_$: a step of" in shown.output


def test_an_output_is_looked_at_before_anything_runs(mpp):
    line = "rehearse --costs nowhere/c.json -- --pipeline-model-parallel-size 2"
    assert "nowhere/c.json: no such folder; make it first" in refusal(mpp(*line.split()))


def test_what_a_batch_system_sends_ends_a_command_as_ctrl_c_does():
    program = (
        "import os, signal, typer\n"
        "from megatron_pp_ext.cli.commands import OneLineErrors\n"
        "app = typer.Typer(cls=OneLineErrors)\n"
        "@app.callback()\n"
        "def group(): ...\n"
        "@app.command()\n"
        "def run():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('went on')\n"
        "    finally:\n"
        "        print('tidied up')\n"
        "app(['run'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 130)
    assert ended.stdout == "tidied up\n"


def test_a_costs_file_for_another_pipeline(mpp, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"stages": [STAGE] * 4}))
    message = refusal(mpp("schedule", "v-half", "-p", 4, "--costs", tmp_path / "costs.json"))
    assert "has costs for 4 stages, but there are 8" in message


@pytest.mark.parametrize("flag", ["csv", "json", "svg", "png", "trace"])
def test_unwritable_output(flag, mpp, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if flag == "trace" else "nowhere")
    result = mpp("schedule", "1f1b", "-p", 2, "-m", 2, f"--{flag}", folder / f"a.{flag}")
    assert "no such folder; make it first" in refusal(result)


def test_a_bug_is_no_bad_input(mpp, monkeypatch):
    def broken(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr("megatron_pp_ext.schedule.catalog.build", broken)
    assert isinstance(mpp("schedule", "1f1b").exception, KeyError)
