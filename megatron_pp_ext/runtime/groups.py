"""The two process groups that carry a pipeline's messages: one to higher ranks, one to lower ones."""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.setting_error import SettingError


def loaded_nccl() -> tuple[int, ...] | None:
    """Return the version of the library that this process has loaded, or None where it cannot be asked.

    Another library than torch's is loaded where LD_PRELOAD or a container brings one.
    """
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    # NCCL_VERSION of nccl.h, since 2.9
    return None if failed else (number.value // 10000, number.value // 100 % 100, number.value % 100)


MAX_CTAS = 4
"""The most blocks that a message's kernel occupies while it waits; NCCL's own choice over NVLink is 16."""

_CLASSES = {"nccl2": "ProcessGroupNCCL2", "nccl-lazy": "ProcessGroupNCCLLazy"}
_NCCL = {"nccl", "nccl-legacy", *_CLASSES}


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of NCCL's process groups; None leaves a value to NCCL, and other backends ignore them all.

    The names are taken from ``ProcessGroupNCCL.Options`` and its ``config``.  ``max_ctas`` and ``min_ctas``
    are blocks of a message's kernel, ``cga_cluster_size`` is the number of blocks in a cluster, and
    ``net_name`` is the network module ("IB", "Socket").
    """

    is_high_priority_stream: bool = True
    max_ctas: int | None = MAX_CTAS
    min_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None


@dataclass(frozen=True, slots=True)
class MessageBackend:
    """The backend of messages: its name for ``new_group``, and whether peers have streams of their own."""

    name: str
    streams_per_peer: bool
    note: str


def message_backend(default: str = "nccl", bound: bool = False) -> MessageBackend:
    """Return the backend of a pipeline's messages in a job whose default process group uses ``default``.

    ``default`` may name backends by device ("cpu:gloo,cuda:nccl").  ``bound`` is whether the default group
    is bound to a device.  Neither a process group nor a GPU is needed.  ValueError if none of the backends
    can carry messages.

    What a backend's name means depends on torch's release, so torch's registry is looked up (as read in
    2.15's ``torch/distributed/distributed_c10d.py``).  In 2.15 "nccl" is "nccl2", with one communicator for
    each group on a device that it binds by itself, and "nccl-lazy" is nccl2 whose peers have communicators of
    their own. The older "nccl" is called "nccl-legacy" there, or "nccl" again under
    ``TORCH_DIST_USE_NCCL2=0``: its peers have communicators of their own unless ``init_process_group`` was
    called with ``device_id``.
    """
    name = _backend_for_messages(default)
    backend = _described(name, bound)
    if name in _NCCL and not backend.streams_per_peer and _available("nccl-lazy"):
        return _described("nccl-lazy", bound)
    return backend


def wire_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device from which ``group`` sends tensors that are computed with on ``device``.

    Gloo sends from host memory only, so on a GPU it is correct but slow, for where NCCL is not available.
    """
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def is_nccl2(name: str) -> bool:
    """Whether the backend called ``name`` is torch 2.15's, which always binds a device."""
    chosen = name == "nccl" and _available("nccl2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    return chosen or name in _CLASSES


def direction_groups(
    ranks: list[int],
    timeout: timedelta | None = None,
    *,
    options: GroupOptions = GroupOptions(),
    edges: Iterable[tuple[int, int]] = (),
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups, down and up, of the pipeline whose global ranks are ``ranks``.

    A message that takes longer than ``timeout`` is an error; None leaves the limit to the backend.  On return
    neighbours have exchanged a message each way, and so have the pipeline's two ends and the pairs of
    pipeline ranks ``edges``, which must be the same on all of them.

    Every rank of the world calls this, with its own pipeline's ranks, as often as all others.  No receive may
    be waiting on a rank meanwhile: making a communicator may stop the device until that receive is done.

    RuntimeError without a default process group, or without a GPU for NCCL; ValueError if none of the default
    group's backends can carry messages, or if this rank is not among ``ranks``.

    A backend either gives every two ranks of a group a communicator and a stream of their own, so that
    messages to one rank never wait in a queue for messages to another, or the whole group shares one.  The
    first is requested where torch has it, and nothing relies on it: receives are placed so that neither can
    lead to a circle (``schedule.messages``).
    """
    backend, device = _default_backend()
    if dist.get_rank() not in ranks:
        raise SettingError(
            f"rank {dist.get_rank()} is not among the ranks {ranks} that were given as its pipeline; give "
            "each rank the pipeline that it belongs to"
        )
    # Groups of other backends may be split from the default one, which takes all ranks, and releases of
    # torch without lazy_init name a group that only its members make by a count that differs between
    # ranks.  In both cases all ranks make all groups.
    members_only = backend.name == "nccl-lazy" and hasattr(dist.ProcessGroupNCCL.Options(), "lazy_init")
    members = sorted(ranks)
    pipelines = [members] if members_only else _all_pipelines(members)

    def make(pipeline: list[int], description: str) -> Any:
        return dist.new_group(
            pipeline,
            timeout=timeout,
            backend=backend.name,
            pg_options=_nccl_options(options, timeout) if backend.name in _NCCL else None,
            use_local_synchronization=members_only,
            group_desc=description,
        )

    groups = {
        tuple(pipeline): [make(pipeline, f"PIPELINE_{way}") for way in ("DOWN", "UP")]
        for pipeline in pipelines
    }
    down, up = groups[tuple(members)]
    _greet_neighbours(ranks, down, up, device, edges)
    return down, up


def collective_group(
    ranks: list[int],
    feature: str,
    timeout: timedelta | None = None,
    *,
    options: GroupOptions = GroupOptions(),
) -> dist.ProcessGroup:
    """Make a group for collectives among the global ``ranks``, this one included, in a stream of its own.

    Debuggers and logs of torch call it by the ``feature`` that it is for.

    Every rank of the world calls this, with its own ranks, as often as all others, and no message may be on
    its way.  On return the communicator is there.  Raises what ``direction_groups`` raises.
    """
    _, device = _default_backend()
    name = dist.get_backend()
    own_ranks = sorted(ranks)
    groups: dict[tuple[int, ...], Any] = {
        tuple(members): dist.new_group(
            members,
            timeout=timeout,
            pg_options=_nccl_options(options, timeout, lazy=False) if name in _NCCL else None,
            group_desc=f"PIPELINE_{feature.upper()}",
        )
        for members in _all_pipelines(own_ranks)
    }
    group = groups[tuple(own_ranks)]
    greeting = torch.zeros(1, device=device)
    dist.all_reduce(greeting, group=group)
    greeting.item()
    return group


def _default_backend() -> tuple[MessageBackend, torch.device]:
    """Return the backend of this job's messages, and the device that it sends from and receives on."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no default process group, and those for messages are made in addition to it; call "
            "torch.distributed.init_process_group first"
        )
    world = dist.group.WORLD
    assert world is not None
    backend = message_backend(dist.get_backend_config(world), world.bound_device_id is not None)
    if backend.name == "gloo":
        return backend, torch.device("cpu")
    if not torch.cuda.device_count():
        raise RuntimeError(
            f"torch.distributed was started with {dist.get_backend(world)!r}, which needs a GPU on every "
            "rank, and this one sees none; look at CUDA_VISIBLE_DEVICES, or start with gloo"
        )
    return backend, world.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def _all_pipelines(members: list[int]) -> list[list[int]]:
    gathered: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, members)
    return [list(pipeline) for pipeline in sorted({*map(tuple, gathered)})]


def _greet_neighbours(
    ranks: list[int],
    down: dist.ProcessGroup,
    up: dist.ProcessGroup,
    device: torch.device,
    edges: Iterable[tuple[int, int]],
) -> None:
    """Send one message each way between neighbours and along ``edges``, in one order on all ranks.

    NCCL makes the communicator of two ranks, or their connection in one that all ranks share, at their first
    message, and both hosts wait for that.  If the schedule decided the order, one rank could wait in this way
    for a second, which waits for a third, which waits for the first.  All pairs exchange messages in one
    group before any does in the other, since a communicator that a group shares may be made when each of
    its ranks first sends or receives.
    """
    rank_here, size = ranks.index(dist.get_rank()), len(ranks)
    greeting = torch.zeros(1, device=device)
    neighbours = {(rank, (rank + 1) % size) for rank in range(size)}
    pairs = sorted({(min(pair), max(pair)) for pair in neighbours.union(edges) if pair[0] != pair[1]})
    for group, sender_first in ((down, True), (up, False)):
        for pair in pairs:
            sender, receiver = pair if sender_first else pair[::-1]
            if rank_here == sender:
                dist.send(greeting, ranks[receiver], group=group)
            elif rank_here == receiver:
                dist.recv(greeting, ranks[sender], group=group)
    greeting.item()  # on a GPU the host has only launched the messages: here it waits, and errors show


def _nccl_options(
    options: GroupOptions, timeout: timedelta | None, lazy: bool = True
) -> dist.ProcessGroupNCCL.Options:
    """Return ``options`` in a new object of torch's: each group writes its name into the one it gets.

    A ``lazy`` group makes communicators for messages of two ranks only.
    """
    converted = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.is_high_priority_stream)
    if timeout is not None:
        converted._timeout = timeout  # torch warns where this differs from the group's
    if lazy and hasattr(converted, "lazy_init"):
        converted.lazy_init = True  # no communicator of the whole group, which no message would use
    for name in ("max_ctas", "min_ctas", "cga_cluster_size", "net_name"):
        value = getattr(options, name)
        if value is not None and hasattr(getattr(converted, "config", None), name):
            setattr(converted.config, name, value)
    return converted


def _backend_for_messages(default: str) -> str:
    """Return the one of the default group's backends that carries a pipeline's messages."""
    if ":" not in default:
        return default
    by_device = dict(pair.split(":") for pair in default.split(","))
    name = by_device.get("cuda", by_device.get("cpu"))
    if name is None or ("cuda" not in by_device and name != "gloo"):
        raise ValueError(
            f"torch.distributed was started with {default!r}, and pipeline messages need a backend for cuda, "
            "or gloo; start it with nccl or gloo (--distributed-backend)"
        )
    return name


def _available(name: str) -> bool:
    # Torch registers the names even where it was built without the backends.
    return hasattr(dist.distributed_c10d, _CLASSES[name]) and dist.is_backend_available(name)


def _described(name: str, bound: bool) -> MessageBackend:
    if name == "gloo":
        return MessageBackend(name, True, "messages go through the hosts' memory")
    if name == "nccl-lazy" or (name in _NCCL and not is_nccl2(name) and not bound):
        return MessageBackend(name, True, "every two ranks have a communicator and a stream of their own")
    if name in _NCCL:
        reason = "" if is_nccl2(name) else ", since init_process_group was called with device_id"
        return MessageBackend(name, False, f"all messages of one direction share a stream{reason}")
    return MessageBackend(name, False, "never tried: NCCL and gloo are what this package is made for")
