"""What all ranks of a job have to agree on, compared before any process group is made."""

import contextlib
import hashlib
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from megatron_pp_ext import version
from megatron_pp_ext.around import bound
from megatron_pp_ext.files import read_bytes
from megatron_pp_ext.job.flag_table import add_flags
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.schedule.entry import CSV_PREFIX

Judge = Callable[[Sequence[str | None]], str]
"""(the report of every rank, None of one that did not come in time) -> the answer; empty if all is well."""

PATIENCE = timedelta(seconds=60)
"""The time in which the other ranks are expected to hear of a problem."""

_ANSWER, _HEARD = "answer", "heard"
_kept: list[dist.Store] = []
"""The store: it has to stay until the process group, which uses the same server, is made."""


def can_rendezvous() -> bool:
    """Whether this process is a rank of a job with others whose default process group is yet to be made."""
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    has_address = all(os.environ.get(name) for name in variables)
    return has_address and int(os.environ["WORLD_SIZE"]) > 1 and not dist.is_initialized()


def meet(report: str, judge: Judge, patience: timedelta, store: dist.Store | None = None) -> str:
    """Give ``report`` to the other ranks and return what ``judge`` makes of all reports, the same on all.

    Every rank calls it once, at its own time, and waits for the others; when ``patience`` is over, ``judge``
    gets the reports that are there.  Without ``store`` the one that the environment describes is used.
    Raises RuntimeError if there is no store to be reached within ``patience``.

    The ranks meet at torch's rendezvous store, the one that the default process group is made with
    afterwards: it is reached over TCP from the hosts, so that no device takes part.  Where torchrun serves no
    store, rank 0 does, and keeps serving it for the process group (``multi_tenant``).
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.PrefixStore("megatron_pp_ext", store or _rendezvous(rank, world_size, patience))
    shared.set(str(rank), report)
    try:
        if shared.add("reports", 1) < world_size:
            shared.wait([_ANSWER], patience)
    except RuntimeError:
        pass  # some rank has not come
    if not shared.check([_ANSWER]):
        ranks = map(str, range(world_size))
        reports = [shared.get(name).decode() if shared.check([name]) else None for name in ranks]
        shared.set(_ANSWER, judge(reports))
    answer = shared.get(_ANSWER).decode()
    if answer:
        _wait_until_heard(shared, world_size, is_host=rank == 0 and store is None and not _is_served())
    return answer


def _rendezvous(rank: int, world_size: int, patience: timedelta) -> dist.Store:
    """Return the store at MASTER_ADDR; unlike ``init_process_group``, do not wait for all ranks first."""
    if not _kept:
        _kept.append(
            dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                world_size,
                is_master=rank == 0 and not _is_served(),
                timeout=patience,
                wait_for_workers=False,
                multi_tenant=True,
            )
        )
    return _kept[0]


def _is_served() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_until_heard(shared: dist.Store, world_size: int, is_host: bool) -> None:
    """Keep the store, if it is this rank's, until all others have the answer: this rank is about to end."""
    if shared.add("hearers", 1) == world_size:
        shared.set(_HEARD, "")
    elif is_host:
        with contextlib.suppress(RuntimeError):
            shared.wait([_HEARD], PATIENCE)


_PREFIX = "megatron_pp_ext: "


def refused(problem: object) -> SystemExit:
    """Return the end of this rank, one line about ``problem``; the the other ranks get it before."""
    line = " ".join(f"{_PREFIX}{problem}".split())
    # The ranks of a rehearsal run alone.
    if can_rendezvous() and "--fake-process-group" not in sys.argv:
        with contextlib.suppress(RuntimeError):  # rank 0, which has the store, has not come or is gone
            meet(json.dumps(line), _judge, PATIENCE)
    return SystemExit(line)


def require_agreement(
    values: Mapping[str, str], patience: timedelta, store: dist.Store | None = None
) -> None:
    """End the process with one line, the same on all ranks, unless all ranks give these ``values``.

    ``values`` are texts by the words in front of them in that line, "the placement is".  The line comes from
    the rank that is refused, if one is, or names the ranks that have not come when ``patience`` is over.

    Ranks that disagree about the placement would wait for each other until the timeout, and so would all
    others for a rank that was refused.
    """
    try:
        problem = meet(json.dumps(values), partial(_judge, patience=patience), patience, store)
    except RuntimeError as error:
        problem = f"the ranks of this job cannot meet: {str(error).partition(chr(10))[0]}"
    if problem:
        raise SystemExit(f"{_PREFIX}{problem}")


def _judge(reports: Sequence[str | None], patience: timedelta = PATIENCE) -> str:
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


_READ = ("pipeline_costs",)
"""The arguments that name files to read; other files are written, on ranks that may each have their own."""


_PARAMETERS = "get_embedding_ranks get_position_embedding_ranks store"


@hook(
    "megatron.training.initialize:_initialize_distributed",
    (_PARAMETERS, f"{_PARAMETERS} skip_model_parallel_init"),
    "one schedule, from the same flags and files, on all ranks of the job",
)
def compare_before_groups(stock: Callable[..., Any], *sizes: Any, **kwargs: Any) -> Any:
    """Compare the pipelines that were requested of all ranks, then let Megatron make its process groups."""
    args = get_args()
    # A script may have made the default process group by itself; the ranks of a rehearsal run alone.
    if args.world_size > 1 and not args.fake_process_group and not dist.is_initialized():
        patience = timedelta(minutes=args.distributed_timeout_minutes)
        store = bound(stock, *sizes, **kwargs).arguments["store"]
        require_agreement(values(args, requested.pipeline()), patience, store)
    return stock(*sizes, **kwargs)


def values(args: Namespace, pipeline: requested.Pipeline | None) -> dict[str, str]:
    """Return the values that have to be the same on all ranks, by the words of an error about them.

    Files go by their content, since each machine may have its own copy, and files to write by whether they
    are given.
    """
    shared = {"megatron_pp_ext is": version.VERSION}
    for action in add_flags(ArgumentParser(add_help=False))._actions:
        value = getattr(args, action.dest)
        if value is None or value is False:
            continue
        spelled = "given" if value is True or isinstance(value, Path) else str(value)
        shared[f"{action.option_strings[0]} is"] = CSV_PREFIX if spelled.startswith(CSV_PREFIX) else spelled
        if action.dest in _READ:
            digest = hashlib.sha256(read_bytes(value)).hexdigest()[:12]
            shared[f"the content of {action.option_strings[0]} has the digest"] = digest
    if args.pipeline_model_parallel_layout is not None:
        shared["--pipeline-model-parallel-layout is"] = str(args.pipeline_model_parallel_layout)
    if pipeline is None:
        return shared
    request, placement = pipeline.request, pipeline.placement
    chunks = f"{placement.chunks} chunk{'s' * (placement.chunks > 1)}"
    ends = ", embedding and output head on the last rank" if placement.ends_on_last else ""
    shared["the placement is"] = f"{placement.shape}, {placement.ranks} ranks x {chunks}{ends}"
    shared["the data-parallel size is"] = str(request.data)
    shared["the microbatches of a step are"] = str(request.microbatches)
    if request.layers is not None:
        shared["the stages have"] = f"{', '.join(map(str, request.layers))} layers"
    if pipeline.source is not None:
        shared["the schedule's digest is"] = pipeline.source.ordinary.digest[:12]
    return shared
