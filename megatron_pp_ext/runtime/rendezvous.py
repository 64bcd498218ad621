"""One answer to the reports of all ranks of a job, before any process group exists.

The ranks meet at torch's rendezvous store, the one that the default process group is made with afterwards:
it is reached over TCP from the hosts, so that no device takes part.  Where torchrun serves no store, rank 0
does, and keeps serving it for the process group (``multi_tenant``).
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

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
        shared.set(_ANSWER, judge([_report_of(rank, shared) for rank in range(world_size)]))
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
    """Whether torchrun serves the store at MASTER_ADDR."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _report_of(rank: int, shared: dist.Store) -> str | None:
    return shared.get(str(rank)).decode() if shared.check([str(rank)]) else None


def _wait_until_heard(shared: dist.Store, world_size: int, is_host: bool) -> None:
    """Keep the store, if it is this rank's, until all others have the answer: this rank is about to end."""
    if shared.add("hearers", 1) == world_size:
        shared.set(_HEARD, "")
    elif is_host:
        with contextlib.suppress(RuntimeError):
            shared.wait([_HEARD], PATIENCE)
