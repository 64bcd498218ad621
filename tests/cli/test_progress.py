"""What a command says while it works."""

import io
import sys
import time

import pytest

from megatron_pp_ext.cli import progress


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_long_work_is_named_where_there_is_no_terminal(patience, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", patience)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    give_up = time.monotonic() + (60 if patience == 0 else 0.1)
    with progress.waiting("thinking"):
        while not sys.stderr.getvalue() and time.monotonic() < give_up:
            time.sleep(0.01)
    assert sys.stderr.getvalue() == ("" if patience else "thinking ...\n")
