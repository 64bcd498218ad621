"""The end of a rank that has found an error of this package: one line from one rank of the job.

Every rank reads the same flags and so finds the same error, each at its own moment.  Rank 0 prints it; the
others wait to be ended by what started them, and print only if that does not happen.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.version import needs

PREFIX = "megatron_pp_ext: "
STATUS = 2
"""The exit status of a rank that was refused."""

LOST = 1
"""The exit status of a rank that lost another one."""

_LOST = re.compile(
    r"Connection (closed|reset|refused)|Connection was likely closed|Broken pipe|remote process exit"
    r"|(Read|Write) error|Timed out waiting"
)
"""The messages of gloo and NCCL where another rank of a group has ended."""

PATIENCE = 15.0
"""The seconds that the first rank of another machine waits before it speaks; its others wait twice that."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the process with status 2 for an error of this package that is raised inside, in one line.

    Such an error is a SystemExit whose text starts with ``PREFIX``, or a ValueError that this package raises.
    An ImportError that states what to install, as Megatron raises for a model's package, ends it likewise.
    So does, with status 1, the end of another rank that this one was communicating with: the reason is in the
    output of that rank.  Everything else passes, and keeps its traceback.
    """
    try:
        yield
    except SystemExit as end:
        if not str(end.code).startswith(PREFIX):
            raise
        problem = str(end.code)
    except ValueError as error:
        if not _is_ours(error):
            raise
        problem = f"{PREFIX}{error}"
    except ImportError as error:
        # Each module around the one that needs the package adds its name after these words.
        message = needs(error.name or "") or str(error).partition(" when instantiating ")[0]
        if "not installed" not in message:
            raise
        problem = f"{PREFIX}{message}"
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        print(f"{PREFIX}{_about_lost(error)}", file=sys.stderr, flush=True)
        raise SystemExit(LOST) from None
    else:
        return
    _end(" ".join(problem.split()))


def _about_lost(error: RuntimeError) -> str:
    """Return a line about the loss of another rank: our own, or what Megatron was doing when it came."""
    line, at, trace = " ".join(str(error).split()), "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("megatron") and module != __name__:
            at = f"{module}.{code.co_qualname}"
        trace = trace.tb_next
    if " has ended, or does not answer, while " in line:
        return line
    rank = os.environ.get("RANK", "0")
    return (
        f"another rank has ended, or does not answer, while rank {rank} was in {at or 'its training script'} "
        f"({line[:160]}); see what the other ranks printed, and go on from a checkpoint"
    )


def _is_ours(error: ValueError) -> bool:
    """Whether the statement that raised ``error`` is in this package, and not in a package that it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def _end(problem: str) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        # torchrun reports every rank that it ends and that does not end well, in seven lines each.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        time.sleep(PATIENCE if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * PATIENCE)
    print(problem, file=sys.stderr, flush=True)
    _tell_torchrun(problem)
    raise SystemExit(STATUS)


def _tell_torchrun(problem: str) -> None:
    """Leave ``problem`` where torchrun looks for the cause that ends its own report of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    about = {"py_callstack": problem, "timestamp": str(int(time.time()))}
    try:
        write_whole(Path(path), json.dumps({"message": {"message": problem, "extraInfo": about}}))
    except OSError as error:
        print(f"{PREFIX}torchrun will not show this error: {error}", file=sys.stderr)
