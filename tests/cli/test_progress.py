"""What a command says while it works."""

import io
import logging
import sys
import time
from unittest import mock

import pytest
from rich.console import Console

from megatron_pp_ext.cli import report

LOG = logging.getLogger("megatron_pp_ext.some_room")


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_long_work_is_named_where_there_is_no_terminal(patience, monkeypatch):
    monkeypatch.setattr(report, "_PATIENCE_SECONDS", patience)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    give_up = time.monotonic() + (60 if patience == 0 else 0.1)
    with report.waiting("thinking"):
        while not sys.stderr.getvalue() and time.monotonic() < give_up:
            time.sleep(0.01)
    assert sys.stderr.getvalue() == ("" if patience else "thinking ...\n")


def logged(monkeypatch, patience):
    monkeypatch.setattr(report, "_PATIENCE_SECONDS", patience)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    give_up = time.monotonic() + 60
    with report.waiting("thinking"):
        while not patience and not sys.stderr.getvalue() and time.monotonic() < give_up:
            time.sleep(0.01)
        LOG.info("some progress")
        LOG.info("more progress")
    LOG.info("nobody waits any more")
    return sys.stderr.getvalue().splitlines()


def test_what_is_logged_meanwhile_is_shown_now_and_then(monkeypatch):
    assert logged(monkeypatch, 3600.0) == []
    assert logged(monkeypatch, 0.0) == ["thinking ..."]
    monkeypatch.setattr(report, "_PAUSE_SECONDS", 0.0)
    lines = ["thinking ...", "thinking: some progress ...", "thinking: more progress ..."]
    assert logged(monkeypatch, 0.0) == lines


def test_what_is_logged_before_is_the_first_line(monkeypatch):
    """Patience ends behind the line, which is then shown in the place of what only names the work."""
    shown = []
    monkeypatch.setattr(report, "Timer", lambda seconds, show: shown.append(show) or mock.Mock())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with report.waiting("thinking"):
        LOG.info("some progress")
        shown[0]()
    assert sys.stderr.getvalue() == "thinking: some progress ...\n"


def test_a_terminal_shows_the_latest_line_beside_its_spinner(monkeypatch):
    terminal = Console(force_terminal=True, width=80, file=io.StringIO())
    monkeypatch.setattr(report, "console", terminal)
    with report.waiting("thinking"):
        LOG.info("some progress")
    assert "thinking: some progress" in terminal.file.getvalue()


def test_a_search_says_what_it_costs_and_how_far_it_is_without_a_terminal(mpp, monkeypatch):
    monkeypatch.setattr(report, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(report, "_PAUSE_SECONDS", 0.0)
    flags = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32000 "
        "--max-position-embeddings 1024 --bf16 --micro-batch-size 1"
    )
    sizes = "--gpus", 8, "--global-batch-size", 32, "--schedules", "1f1b,zb-h1"
    result = mpp("search", *sizes, "--cpu-seconds", 60, "--", *flags.split())
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert any(line.startswith("searching for at most 60 s of a processor (--cpu-seconds)") for line in lines)
    assert any("bounding" in line for line in lines)
    assert any("replaying" in line and "best so far" in line for line in lines)
