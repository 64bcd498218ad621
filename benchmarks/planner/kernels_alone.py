"""The planner's seconds of kernels and collectives that run alone, over those of a folder of measured ones.

The folder has tables of ai-dynamo/aiconfigurator (see ``components``).
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.attention import rule_operations
from megatron_pp_ext.costs.kernels import AttentionWork
from megatron_pp_ext.costs.mamba import CONVOLVED
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.costs.system_kernels import (
    FLEXIBLE_PROCESSORS,
    Routing,
    SystemKernelSeconds,
    sent_once_seconds,
)
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.model_description import describe

SYSTEMS = {"a100": "a100-80g", "h100": "h100", "h200": "h200", "b200": "b200"}
_TYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8": "hybrid"},
    "fp8_block": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp4": {"fp4": "e2m1"},
}
_NAMES = {"fp8_block": "fp8 with scales of blocks"}
_SIDE = 1024
"""Products are compared whose sides are all this long or longer."""

_COPIED_ALONE = 0.9
"""The share of the data sheet's rate of device memory that a large kernel alone reaches."""

_QUANTIZED = {
    ("fp8", "h100"): (8.8e-6, 2.39e-12),
    ("fp8", "h200"): (8.9e-6, 2.1e-12),
    ("fp8", "b200"): (15.1e-6, 1.11e-12),
    ("fp4", "b200"): (8e-6, 0.705e-12),
    ("fp8_block", "h100"): (3e-6, 2e-12),
    ("fp8_block", "h200"): (4e-6, 2e-12),
}
"""The time of a product in FP8 or NVFP4 of the source besides the product: seconds to start, and for a number
of the left operand, which it quantizes; fitted.  The planner counts casts by themselves."""

_ATTENTION_START, _EXPERTS_START = 20e-6, 31e-6
"""The time of the small kernels that the source starts besides attention and besides experts; fitted."""

_COLLECTIVES = {
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
_LEAST_MESSAGE, _LEAST_SENT = 2**16, 256
_MANY = 1024

type Sample = tuple[str, str, float]
"""A component, its device, and the planner's seconds for each second measured."""


@cache
def _alone(device: str) -> System:
    """Return the system at the rates of kernels that run alone."""
    return replace(system.read(SYSTEMS[device]), sustained={"copy": _COPIED_ALONE})


@cache
def _kernels(device: str, **flags: Any) -> SystemKernelSeconds:
    model = {"num_layers": 1, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 1024}
    return SystemKernelSeconds(
        _alone(device), Job.of(describe({**model, "bf16": True, "attention_dropout": 0.0, **flags}))
    )


def _rows(folder: Path, name: str, device: str) -> Iterator[dict[str, str]]:
    file = folder / f"{name}_{device}.csv.gz"
    if file.exists():
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            yield from csv.DictReader(opened)


def _is_held_out(*shape: object) -> bool:
    """Whether a shape took no part in fitting, by a hash of it."""
    return sha256(" ".join(map(str, shape)).encode()).digest()[0] % 2 == 1


def products(folder: Path, device: str) -> Iterator[Sample]:
    """Yield products of matrices by type; those in FP8 and NVFP4 quantize their left operand."""
    for row in _rows(folder, "gemm", device):
        m, n, k = (int(row[side]) for side in "mnk")
        dtype = _TYPES.get(row["gemm_dtype"])
        if dtype is None or min(m, n, k) < _SIDE or not _is_held_out(m, n, k):
            continue
        start, per_number = _QUANTIZED.get((dtype, device), (0.0, 0.0))
        seconds = _kernels(device, **_FLAGS[dtype]).product(m, n, k)
        yield (
            f"products in {_NAMES.get(dtype, dtype)}",
            device,
            1e3 * (seconds + start + per_number * m * k) / float(row["ms"]),
        )


def attention(folder: Path, device: str) -> Iterator[Sample]:
    """Yield forwards of causal attention, in whose time queries, keys, values and results are copied once."""
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "window_size")
    for row in _rows(folder, "attention_forward", device):
        batch, length, heads, keys, width, window = shape = tuple(int(row[name]) for name in names)
        if not _is_held_out(*shape):
            continue
        visible = min(window or length, length)
        seen = (visible - visible * visible / (2 * length)) / length
        operations = 4 * batch * heads * length * length * width
        kernels = _kernels(device)
        seconds, _ = kernels.attention(AttentionWork(operations, 0, True, length, width, seen))
        seconds += kernels.copy(8 * batch * length * width * (heads + keys)) + _ATTENTION_START
        name = f"attention, heads of {width}" + (f", window {window}" if window else "")
        yield name, device, 1e3 * seconds / float(row["ms"])


def latent_attention(folder: Path, device: str) -> Iterator[Sample]:
    """Yield forwards of multi-latent attention, whose heads are 192 wide and have values of 128."""
    for row in _rows(folder, "mla_forward", device):
        heads, batch, length = shape = tuple(int(row[name]) for name in ("num_heads", "batch_size", "isl"))
        if row["kv_cache_dtype"] != "bfloat16" or length < _SIDE or not _is_held_out(*shape):
            continue
        kernels = _kernels(device)
        operations = 2 * batch * heads * length * length * (192 + 128)
        seconds, _ = kernels.attention(AttentionWork(operations, 0, True, length, (192 + 128) / 2))
        seconds += kernels.copy(4 * batch * length * heads * (192 + 128)) + _ATTENTION_START
        yield "multi-latent attention", device, 1e3 * seconds / float(row["ms"])


def collectives(folder: Path, device: str) -> Iterator[Sample]:
    """Yield collectives of sizes between the rows of the system."""
    machine = _alone(device)
    for row in _rows(folder, "nccl", device):
        ranks, name = int(row["num_gpus"]), _COLLECTIVES[row["op_name"]]
        size = int(row["message_size"]) * (2 if row["nccl_dtype"] == "half" else 1)
        if size < _LEAST_MESSAGE or size in {row_of_system[1] for row_of_system in getattr(machine, name)}:
            continue
        seconds = getattr(machine, f"{name}_seconds")(size, ranks)
        yield f"{name.replace('_', '-')}, {ranks} ranks", device, 1e3 * seconds / float(row["ms"])


def experts(folder: Path, device: str) -> Iterator[Sample]:
    """Yield a rank's experts with gated activations and equally many tokens each, from routed tokens on.

    A row that reaches less than half of the rate of another one of the same width, type and more than a
    thousand tokens for each expert ran kernels that its source did not tune, and is left out.
    """
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    best: dict[object, float] = defaultdict(float)
    rows = []
    for row in _rows(folder, "experts", device):
        tokens, hidden, inner, chosen, every, cut, ranks = shape = tuple(int(row[name]) for name in names)
        is_like = row["kernel_source"] == "moe_torch_flow_cutlass" and row["distribution"] == "balanced"
        if not is_like or row["moe_dtype"] not in ("bfloat16", "fp8"):
            continue
        local_experts, cut_inner, tokens_each = every / ranks, inner / cut, tokens * chosen / every
        key = (row["moe_dtype"], hidden, cut_inner) if tokens_each >= _MANY else None
        rate = local_experts * tokens_each * cut_inner * hidden / float(row["ms"])
        best[key] = max(best[key], rate)
        rows.append((shape, key, rate, local_experts, cut_inner, tokens_each, row))
    for shape, key, rate, local_experts, cut_inner, tokens_each, row in rows:
        if not _is_held_out(*shape) or (key and rate < best[key] / 2):
            continue
        tokens, hidden = shape[:2]
        kernels = _kernels(device, **_FLAGS[_TYPES[row["moe_dtype"]]])
        seconds = kernels.product(tokens_each, 2 * cut_inner, hidden, groups=local_experts)
        seconds += kernels.product(tokens_each, hidden, cut_inner, groups=local_experts)
        seconds += kernels.copy(
            2 * local_experts * tokens_each * (3 * hidden + 3 * cut_inner) + 4 * tokens * hidden
        )
        seconds += kernels.cast(local_experts * tokens_each * (hidden + cut_inner)) + _EXPERTS_START
        name = f"experts in {_TYPES[row['moe_dtype']]}, {_tokens(tokens_each)} tokens each"
        yield name, device, 1e3 * seconds / float(row["ms"])


def _tokens(count: float) -> str:
    return "1,024 or more" if count >= _MANY else "128 to 1,023" if count >= 128 else "fewer than 128"


def sent_once(folder: Path, device: str) -> Iterator[Sample]:
    """Yield DeepEP's dispatches in FP8, and its combinations in half precision, among eight GPUs of a node.

    They run on as many processors as Megatron gives them.
    """
    names = ("num_token", "hidden_size", "num_topk", "num_experts")
    for row in _rows(folder, "deepep", device):
        tokens, hidden, chosen, _ = shape = tuple(int(row[name]) for name in names)
        if tokens < _LEAST_SENT or not _is_held_out(*shape):
            continue
        for name, number in (("dispatch", 1), ("combine", 2)):
            if int(row[f"{name}_sms"]) == FLEXIBLE_PROCESSORS:
                seconds = sent_once_seconds(_alone(device), number * tokens * hidden, Routing(chosen), 8, 1)
                yield f"DeepEP's {name}", device, 1e6 * seconds / float(row[f"{name}_transmit_us"])


def new_kinds(folder: Path, device: str) -> Iterator[Sample]:
    """Yield forwards of gated delta rules, and the convolutions before Mamba-2's scan."""
    for row in _rows(folder, "gdn", device):
        names = ("batch_size", "seq_len", "num_v_heads", "head_k_dim", "head_v_dim")
        batch, length, heads, key, value = (int(row[name]) for name in names)
        if "delta_rule" in row["kernel_source"] and length >= _SIDE:
            seconds, _ = _kernels(device).delta_rule(rule_operations(batch * length * heads, key, value))
            yield "gated delta rule", device, 1e3 * seconds / float(row["ms"])
    for row in _rows(folder, "mamba2", device):
        tokens, width = int(row["num_tokens"]), int(row["nheads"]) * int(row["head_dim"])
        width += 2 * int(row["n_groups"]) * int(row["d_state"])
        if int(row["seq_len"]) >= _SIDE:
            seconds = _kernels(device).copy(CONVOLVED * 4 * tokens * width)
            yield "Mamba-2's convolution", device, 1e3 * seconds / float(row["ms"])


PARTS = (products, attention, latent_attention, collectives, sent_once, experts, new_kinds)
