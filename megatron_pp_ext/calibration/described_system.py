"""Describes the machine that was measured as a system for ``--system``, with the source of every figure."""

from dataclasses import replace
from datetime import date

import psutil
import torch

from megatron_pp_ext.calibration.ranks import Findings
from megatron_pp_ext.costs.system import Link, System

_OF_LIKE = (
    "peak_rates",
    "processors",
    "around_loop",
    "kernel_seconds",
    "sustained",
    "reserved_bytes",
    "host_memory_bytes_per_second",
)
"""The figures that are those of a device's kind: of its data sheet, or fitted to training runs."""


def described_system(findings: Findings, ranks: int, on_gpu: bool, like: System | None) -> System:
    """Return the system on which ``ranks`` ranks measured ``findings``.

    The network, and all else that was not measured, are those of ``like``.  Without ``like`` the network
    is taken to be as fast as the links within the machine.  ``like`` is needed where only one rank measured.
    """
    if on_gpu:
        device = torch.cuda.get_device_properties(0)
        name, memory, transport = device.name, device.total_memory, "NCCL"
    else:
        name, memory, transport = "cpu", psutil.virtual_memory().total // ranks, "gloo"
    how = f"measured on {date.today()} by mpp calibrate, {ranks} rank(s) at once"
    sources = {
        "memory_bytes": "reported by the device" if on_gpu else "the machine's, shared by its cores",
        "matrix_rates": how,
        "copy_bytes_per_second": how,
        "kernel_seconds": how,
        "attention_rates": how,
    }
    if findings.bytes_per_second is None or findings.latency_seconds is None:
        assert like is not None
        node, sources["node"] = like.node, f"{like.name}'s: one device has no link to measure"
    else:
        node = Link(findings.bytes_per_second, findings.latency_seconds)
        sources.update(dict.fromkeys(("node", *findings.collectives), f"{how}, over {transport}"))
    host = None
    if findings.host is not None:
        latency, rate = findings.host
        host, sources["host"] = Link(rate, latency), f"{how}, both ways at once"
    network, sources["network"] = node, "not measured: taken to be as within the machine"
    if like is not None:
        network, sources["network"] = like.network, f"{like.name}'s: not measured"
    measured = System(
        name=name,
        gpus_per_node=ranks,
        memory_bytes=float(memory),
        matrix_rates=findings.matrix_rates,
        copy_bytes_per_second=findings.copy_bytes_per_second,
        kernel_seconds=findings.kernel_seconds,
        node=node,
        network=network,
        host=host,
        attention_rates=findings.attention_rates,
        all_reduce=findings.collectives.get("all_reduce", ()),
        gather=findings.collectives.get("gather", ()),
        all_to_all=findings.collectives.get("all_to_all", ()),
        sources=sources,
    )
    if like is None:
        return measured
    fitted = {name: getattr(like, name) for name in (*_OF_LIKE, *["host"] * (host is None))}
    sources.update({name: f"{like.name}'s: not measured" for name, value in fitted.items() if value})
    per_node = max(ranks, like.gpus_per_node)
    sources["gpus_per_node"] = f"{like.name}'s" if per_node > ranks else how
    return replace(measured, gpus_per_node=per_node, **fitted)
