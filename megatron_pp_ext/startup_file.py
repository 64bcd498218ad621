"""The file in site-packages whose line lets programs follow the schedule that the environment asks for."""

import sysconfig
from pathlib import Path

from megatron_pp_ext.files import write_whole

SCHEDULE = "MEGATRON_PP_SCHEDULE"
"""The variable with the name of the schedule."""

PREFIX, CACHE = "MEGATRON_PP_", "MEGATRON_PP_EXT_CACHE"
"""The beginning of the variables of a schedule, and the one variable that has it without being one."""

# An interpreter without the variables only looks them up; a misspelled one must not go unnoticed.
_LINE = (
    f'import os; any(name.startswith("{PREFIX}") and name != "{CACHE}" for name in os.environ) and '
    '__import__("megatron_pp_ext.activation", fromlist=["watch"]).watch()\n'
)


def path() -> Path:
    """Return the place of the file that Python reads when it starts in this environment."""
    return Path(sysconfig.get_path("purelib"), "megatron_pp_ext_activation.pth")


def activate() -> Path:
    """Let programs of this environment follow ``MEGATRON_PP_SCHEDULE``, and return the file that does so.

    OSError if site-packages cannot be written.
    """
    write_whole(path(), _LINE)
    return path()


def deactivate() -> bool:
    """Undo ``activate``; return whether there was anything to undo."""
    was_active = is_active()
    path().unlink(missing_ok=True)
    return was_active


def is_active() -> bool:
    """Return whether programs of this environment follow ``MEGATRON_PP_SCHEDULE``."""
    return path().exists()
