"""The ``mpp`` command: look at schedules, and at this machine."""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``app``, the program with all its commands, which is imported when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The imports take a second or more, in which Ctrl-C is no error.
    try:
        # Each adds its commands, in the order of mpp --help.
        from megatron_pp_ext.cli import (  # noqa: F401, I001
            schedule,
            machine,
            estimate,
            model,
            partition,
            rehearse,
            search,
            verify,
        )
        from megatron_pp_ext.cli.commands import app
    except KeyboardInterrupt:
        sys.exit(130)
    return app
