"""Starts the ranks of a calibration and describes the machine that they measured as a system."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from megatron_pp_ext.calibration import measure
from megatron_pp_ext.calibration.measure import COLLECTIVES
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.processor import ProcessorTime

MOST_CPU_RANKS = 8
"""The most ranks on CPUs, where each has a core; more would show nothing new about one machine."""


_WAITED = "waited"
"""The figure of a calibration that is none of the machine's."""

type Figures = dict[str, Any]
"""Measurements by the fields of a ``System``; figures of messages need a second rank."""


def available(on_gpu: bool) -> int:
    """Return the number of ranks for which this machine has a device or a core."""
    if on_gpu:
        return torch.cuda.device_count()
    return min(MOST_CPU_RANKS, len(os.sched_getaffinity(0)))


def parts(ranks: int) -> int:
    """Return how many times ``calibrate`` with so many ``ranks`` reports progress."""
    of_one_rank = len(measure.DTYPES) + 4
    return of_one_rank if ranks < 2 else of_one_rank + 1 + len(measure.group_sizes(ranks))


def calibrate(ranks: int, on_gpu: bool, report: Callable[[str], None]) -> tuple[Figures, float | None]:
    """Measure with ``ranks`` processes at once; ``report`` gets the name of each part that is done.

    With the figures goes the part of its time for which a rank waited for a processor, the most of any; None
    where the system does not report it.  RuntimeError when a rank fails.
    """
    # A process that has touched a GPU cannot be forked; without one, forking saves seconds of imports.
    context: Any = processes.get_context("spawn" if on_gpu else "fork")
    running: dict[Connection, Any] = {}
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        try:
            for rank in range(ranks):
                reader, writer = context.Pipe(duplex=False)
                arguments = (rank, ranks, on_gpu, f"{folder}/store", writer)
                process = context.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                writer.close()
                running[reader] = process
            figures = _collect(dict(running), report)
            return figures, figures.pop(_WAITED)
        finally:
            for process in running.values():
                process.terminate()
                process.join()


def _collect(running: dict[Connection, Any], report: Callable[[str], None]) -> Figures:
    """Wait for the figures of rank 0; RuntimeError for a rank that fails."""
    while True:
        for reader in wait(list(running)):
            assert isinstance(reader, Connection)
            try:
                received = reader.recv()
            except EOFError:
                process = running.pop(reader)
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"a rank of the calibration ended with {process.exitcode}") from None
                continue
            if isinstance(received, dict):
                return received
            if isinstance(received, Exception):
                raise RuntimeError(f"a rank of the calibration failed: {received}")
            report(received)


def _run_rank(rank: int, ranks: int, on_gpu: bool, store: str, writer: Any) -> None:
    try:
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
            if "lo" in (name for _, name in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            device_id=device if on_gpu else None,
        )
        figures: Figures = {}
        before = ProcessorTime.now()
        for name in _measured(figures, device):
            if rank == 0:
                writer.send(name)
        waits: list[float | None] = [None] * ranks
        dist.all_gather_object(waits, ProcessorTime.now().waited_since(before))
        figures[_WAITED] = max((wait for wait in waits if wait is not None), default=None)
        if rank == 0:
            writer.send(figures)
        # The connections of a rank close when it ends, so all ranks end together.
        dist.barrier()
    except Exception as error:
        writer.send(error)


def _measured(figures: Figures, device: torch.device) -> Iterator[str]:
    """Fill ``figures`` in, and yield the name of each part that is done."""
    figures["matrix_rates"] = {}
    for name, rows in measure.matrix_rates(device):
        figures["matrix_rates"][name] = rows
        yield f"products in {name}"
    figures["copy_bytes_per_second"] = measure.copy_rate(device)
    yield "copies"
    figures["attention_rates"] = measure.attention_rates(device)
    yield "attention"
    figures["kernel_seconds"] = measure.launch_seconds(device)
    yield "launches"
    if device.type == "cuda":
        figures["host"] = measure.host_link(device)
    yield "copies to the host"
    if dist.get_world_size() < 2:
        return
    figures["node"] = measure.message(device)
    yield "messages"
    for rates in measure.collectives(device):
        for kind, rows in rates.items():
            figures.setdefault(kind, []).extend(rows)
        yield "collectives"


_OF_LIKE = (
    "peak_rates",
    "processors",
    "around_loop",
    "kernel_seconds",
    "exposed_sums",
    "persistent_products",
    "sustained",
    "reserved_bytes",
    "host_memory_bytes_per_second",
)
"""The figures of a device's kind: from its data sheet, or fitted to training runs."""


def described_system(figures: Figures, ranks: int, on_gpu: bool, like: System | None) -> System:
    """Return the system on which ``ranks`` ranks measured ``figures``.

    The network, and all else that was not measured, are taken from ``like``.  Without ``like`` the network
    is taken to be as fast as the links within the machine.  ``like`` is needed where only one rank measured.
    """
    if on_gpu:
        device = torch.cuda.get_device_properties(0)
        name, memory, transport = device.name, device.total_memory, "NCCL"
    else:
        name, memory, transport = "cpu", psutil.virtual_memory().total // ranks, "gloo"
    method = f"measured on {date.today()} by mpp calibrate, {ranks} rank(s) at once"
    ways = {"host": ", both ways at once", **dict.fromkeys(("node", *COLLECTIVES), f", over {transport}")}
    sources = {figure: method + ways.get(figure, "") for figure in figures}
    sources["memory_bytes"] = "reported by the device" if on_gpu else "the machine's, shared by its cores"
    if "node" not in figures:
        assert like is not None
        figures = figures | {"node": like.node}
        sources["node"] = f"{like.name}'s: one device has no link to measure"
    network, sources["network"] = figures["node"], "not measured: taken to be as within the machine"
    if like is not None:
        network, sources["network"] = like.network, f"{like.name}'s: not measured"
    properties: Figures = {
        "name": name,
        "gpus_per_node": ranks,
        "memory_bytes": float(memory),
        "network": network,
    }
    measured = System(**properties, **figures, sources=sources)
    if like is None:
        return measured
    fitted = {name: getattr(like, name) for name in (*_OF_LIKE, *["host"] * ("host" not in figures))}
    sources.update({name: f"{like.name}'s: not measured" for name, value in fitted.items() if value})
    per_node = max(ranks, like.gpus_per_node)
    sources["gpus_per_node"] = f"{like.name}'s" if per_node > ranks else method
    return replace(measured, gpus_per_node=per_node, **fitted)
