"""The ``mpp`` command: look at schedules, and at what this machine has."""

# Each adds a command.
from megatron_pp_ext.cli import (  # noqa: F401
    activate,
    calibrate,
    estimate,
    model,
    partition,
    profile,
    rehearse,
    search,
    verify,
)
from megatron_pp_ext.cli.commands import app

__all__ = ["app"]
