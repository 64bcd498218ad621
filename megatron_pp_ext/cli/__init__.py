"""The ``mpp`` command: look at schedules, and at what this machine has."""

# Each adds its commands, in the order of mpp --help.
from megatron_pp_ext.cli import (  # noqa: F401, I001
    schedule,
    compare,
    trace,
    doctor,
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
