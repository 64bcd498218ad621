"""Describes the machine that was measured as a system for ``--system``, with the source of every figure."""

from dataclasses import replace
from datetime import date

import psutil
import torch

from megatron_pp_ext.calibration.measure import COLLECTIVES
from megatron_pp_ext.calibration.ranks import Figures
from megatron_pp_ext.costs.system import System

_OF_LIKE = (
    "peak_rates",
    "processors",
    "around_loop",
    "kernel_seconds",
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
