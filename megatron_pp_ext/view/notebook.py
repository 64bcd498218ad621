"""How schedules and timelines show themselves in a notebook: as the page of ``page``."""

import sys
from functools import cache

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import page


def html(shown: Schedule | Timeline) -> str:
    """Return what a notebook shows of a timeline, or of a schedule at unit cost."""
    return page.frame(simulate(shown) if isinstance(shown, Schedule) else shown)


@cache
def register() -> None:
    """Let IPython, where this process is its kernel, show schedules and timelines by ``html``."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        for shown in (Schedule, Timeline):
            shell.display_formatter.formatters["text/html"].for_type(shown, html)
