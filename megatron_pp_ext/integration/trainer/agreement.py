"""Agreement of all ranks of a job on their flags, with an error on all of them where they differ.

Ranks that disagree about the placement would wait for each other until the timeout, and so would all others
for a rank that was refused.
"""

import contextlib
import json
import linecache
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.runtime import rendezvous

_PREFIX = "megatron_pp_ext: "


def refused(problem: object) -> SystemExit:
    """Return the end of this rank, one line about ``problem``; the the other ranks get it before."""
    line = " ".join(f"{_PREFIX}{problem}".split())
    # The ranks of a rehearsal run alone.
    if rendezvous.can_rendezvous() and "--fake-process-group" not in sys.argv:
        with contextlib.suppress(RuntimeError):  # rank 0, which has the store, has not come or is gone
            rendezvous.meet(json.dumps(line), _judge, rendezvous.PATIENCE)
    return SystemExit(line)


def require_agreement(
    values: Mapping[str, str], patience: timedelta, store: dist.Store | None = None
) -> None:
    """End the process with one line, the same on all ranks, unless all ranks give these ``values``.

    ``values`` are texts by the words in front of them in that line, "the placement is".  The line comes from
    the rank that is refused, if one is, or names the ranks that have not come when ``patience`` is over.
    """
    try:
        problem = rendezvous.meet(json.dumps(values), partial(_judge, patience=patience), patience, store)
    except RuntimeError as error:
        problem = f"the ranks of this job cannot meet: {str(error).partition(chr(10))[0]}"
    if problem:
        raise SystemExit(f"{_PREFIX}{problem}")


def _judge(reports: Sequence[str | None], patience: timedelta = rendezvous.PATIENCE) -> str:
    """Return the error in ``reports``: values that differ by name, or the line of a rank that was refused."""
    received: list[Any] = [None if report is None else json.loads(report) for report in reports]
    lines = [report if isinstance(report, str) else None for report in received]
    if any(lines):
        line, *_ = filter(None, lines)
        ranks = _named([rank for rank, other in enumerate(lines) if other == line])
        verb = "were" if ranks.startswith("ranks") else "was"
        return f"{ranks} of this job {verb} refused: {line.removeprefix(_PREFIX)}"
    if None in received:
        absent = _named([rank for rank, report in enumerate(received) if report is None])
        return (
            f"{absent} of this job did not report within {patience.total_seconds() / 60:g} minutes with "
            "which schedule to run; start all ranks with megatron_pp_ext, and look at what these "
            "ranks printed"
        )
    for name in dict.fromkeys(name for values in received for name in values):
        values = [values.get(name, "not given") for values in received]
        if len(set(values)) > 1:
            parts = [
                f"{value} on {_named([rank for rank, other in enumerate(values) if other == value])}"
                for value in dict.fromkeys(values)
            ]
            return (
                f"the ranks of this job differ: {name} {' and '.join(parts)}; start all ranks with the same "
                "flags and files, and the same megatron_pp_ext"
            )
    return ""


def _named(ranks: Sequence[int]) -> str:
    """Return ``ranks``, which rise, in words; three or more in a row as 4-6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spelled = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spelled)}"


def failed_check(error: Exception) -> str:
    """Return in one line which check of Megatron's raised ``error``, since many of them have no message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    message = " ".join(str(error).split())
    if trace is None:
        return message
    frame, line = trace.tb_frame, trace.tb_lineno
    check = message or linecache.getline(frame.f_code.co_filename, line).strip().rstrip(",\\ ")
    return f"{check} ({frame.f_globals.get('__name__')}, line {line})"
