"""What ``mpp estimate`` and ``mpp search`` do with Megatron's verdict on what they print."""

import json

import pytest

from megatron_pp_ext.job import ask_megatron
from megatron_pp_ext.job.ask_megatron import Megatron, Verdict

MODEL = ("--model", "llama3-8b", "--global-batch-size", "32")
FLAGS = ("--", "--micro-batch-size", "1")


def test_the_verdict_comes_last(mpp, tmp_path):
    file = tmp_path / "found.json"
    result = mpp("estimate", *MODEL, "--json", file, *FLAGS, "--pipeline-model-parallel-size", "2")
    accepted = f"Megatron {ask_megatron.release()} accepts these flags"
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == accepted
    assert json.loads(file.read_text())["megatron"]["accepts"] is True


def test_a_refusal_ends_the_command_after_its_numbers(mpp, tmp_path):
    file = tmp_path / "found.json"
    result = mpp("estimate", *MODEL, "--json", file, *FLAGS, "--cp-comm-type", "a2a+p2p")
    assert result.exit_code == 2 and "MFU" in result.stdout and "torchrun" not in result.stdout
    assert "refuses these flags: --hierarchical-context-parallel-sizes" in result.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    "command", [("estimate",), ("search", "--gpus", "8", "--schedules", "1f1b", "--top", "1")]
)
def test_nobody_is_asked_where_that_is_declined(command, mpp, monkeypatch):
    monkeypatch.setattr(ask_megatron, "_start", lambda: pytest.fail("asked"))
    result = mpp(*command, "--no-ask", *MODEL, *FLAGS, "--cp-comm-type", "a2a+p2p")
    assert result.exit_code == 0 and "torchrun" in result.stdout and "accepts" not in result.stdout


def test_a_search_recommends_what_megatron_accepts(mpp, monkeypatch, tmp_path):
    """The first of the best that it is asked about is refused, and another one takes its place."""
    search = "search", "--gpus", "8", "--schedules", "1f1b,zb-h1", "--top", "2", "--json"
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert mpp(*search, before, *MODEL, *FLAGS).exit_code == 0
    first = json.loads(before.read_text())["best"][0]
    refused = first["flags"]

    def ask(self, question):
        is_first = set(question.flags) == {*refused} - {"--pipeline-schedule", "1f1b", "zb-h1"}
        return Verdict("1.2", "for a test" if is_first else "")

    monkeypatch.setattr(Megatron, "ask", ask)
    result = mpp(*search, after, *MODEL, *FLAGS)
    assert f"left out: {first['name']}, which Megatron refuses: for a test" in result.stdout
    assert result.stdout.splitlines()[-1] == "Megatron 1.2 accepts these flags"
    assert first["name"] not in [one["name"] for one in json.loads(after.read_text())["best"]]

    monkeypatch.setattr(Megatron, "ask", lambda self, question: Verdict("1.2", "for a test"))
    result = mpp(*search, after, *MODEL, *FLAGS)
    assert result.exit_code == 2 and "Megatron 1.2 refuses these flags: for a test" in result.stderr
