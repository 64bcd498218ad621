import pytest
from typer.testing import CliRunner

from megatron_pp_ext.cli import app, report


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables in whole lines, also where the environment told the console its width when it was made."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(report.console, "width", 160)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No line that says what a slow machine is waiting for: tests count the lines of errors."""
    monkeypatch.setattr(report, "_PATIENCE_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def megatron(own_cache, shared_megatron):
    """Commands compile and ask anew; the process that is asked is one for all."""


@pytest.fixture
def mpp():
    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run
