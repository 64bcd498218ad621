"""How far are the parts of the cost model from kernels and collectives measured alone?

python -m benchmarks.planner.components KERNELS --before benchmarks/planner/components_before.json

KERNELS is a folder with tables of ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a51, in
aic-core/src/aiconfigurator_core/systems/data), packed by gzip and named by what they have and their device,
as in gemm_h100.csv.gz.  The tables themselves are no part of this project; figures fitted to them are, in
megatron_pp_ext/costs/systems.  They are fitted to one half of the shapes, and compared with the other half.
"""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.gated_delta_net import rule_operations
from megatron_pp_ext.costs.kernels import SystemKernelSeconds
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.model_description import describe

_SYSTEMS = {"a100": "a100-80g", "h100": "h100", "h200": "h200", "b200": "b200"}
_TYPES = {"bfloat16": "bf16", "fp8": "fp8"}
_SIDE = 1024
"""Products are compared whose sides are all this long or longer."""

_COPIED_ALONE = 0.9
"""The share of the data sheet's rate of device memory that a large kernel alone reaches."""

_QUANTIZED = {"h100": (8.8e-6, 2.39e-12), "h200": (8.9e-6, 2.1e-12), "b200": (15.1e-6, 1.11e-12)}
"""What an FP8 product of the source takes beside the product: the seconds to start, and those for a number of
the left operand, which it quantizes; fitted.  The planner counts casts by themselves."""

_ATTENTION_START, _EXPERTS_START = 20e-6, 31e-6
"""What the small kernels take that the source starts beside attention and beside experts; fitted."""

_COLLECTIVES = {
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
_LEAST_MESSAGE = 2**16

_GOALS = {"products": 0.08, "attention": 0.1}
_OTHERS = 0.15

type Sample = tuple[str, str, float]
"""A component, its device, and the planner's seconds for each second measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """Planner over measured: the median, the 16th and 84th of 100, and the median distance from it."""

    shapes: int
    median: float
    low: float
    high: float
    deviation: float

    @property
    def spread(self) -> float:
        """Half of the range of the middle 68 of 100, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


@cache
def _alone(device: str) -> System:
    """Return the system at the rates of kernels that run alone."""
    return replace(system.read(_SYSTEMS[device]), sustained={"copy": _COPIED_ALONE})


@cache
def _kernels(device: str, **flags: Any) -> SystemKernelSeconds:
    model = {"num_layers": 1, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 1024, "bf16": True}
    return SystemKernelSeconds(_alone(device), Job.of(describe({**model, **flags})))


def _rows(folder: Path, name: str, device: str) -> Iterator[dict[str, str]]:
    file = folder / f"{name}_{device}.csv.gz"
    if file.exists():
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            yield from csv.DictReader(opened)


def _is_held_out(*shape: object) -> bool:
    """Whether a shape took no part in fitting, by a hash of it."""
    return sha256(" ".join(map(str, shape)).encode()).digest()[0] % 2 == 1


def products(folder: Path, device: str) -> Iterator[Sample]:
    """Yield products of matrices by type; those in FP8 quantize their left operand."""
    for row in _rows(folder, "gemm", device):
        m, n, k = (int(row[side]) for side in "mnk")
        dtype = _TYPES.get(row["gemm_dtype"])
        if dtype is None or min(m, n, k) < _SIDE or not _is_held_out(m, n, k):
            continue
        is_fp8 = dtype == "fp8"
        start, each = _QUANTIZED[device] if is_fp8 else (0.0, 0.0)
        seconds = _kernels(device, **({"fp8": "hybrid"} if is_fp8 else {})).product(m, n, k)
        yield f"products in {dtype}", device, 1e3 * (seconds + start + each * m * k) / float(row["ms"])


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
        seconds, _ = kernels.attention(operations, 0, True, length, width, seen)
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
        seconds, _ = kernels.attention(operations, 0, True, length, (192 + 128) / 2)
        seconds += kernels.copy(4 * batch * length * heads * (192 + 128)) + _ATTENTION_START
        yield "multi-latent attention", device, 1e3 * seconds / float(row["ms"])


def collectives(folder: Path, device: str) -> Iterator[Sample]:
    """Yield collectives of sizes between those of the system's rows."""
    machine = _alone(device)
    for row in _rows(folder, "nccl", device):
        ranks, name = int(row["num_gpus"]), _COLLECTIVES[row["op_name"]]
        size = int(row["message_size"]) * (2 if row["nccl_dtype"] == "half" else 1)
        if size < _LEAST_MESSAGE or size in {known[1] for known in getattr(machine, name)}:
            continue
        seconds = getattr(machine, f"{name}_seconds")(size, ranks)
        yield f"{name.replace('_', '-')}, {ranks} ranks", device, 1e3 * seconds / float(row["ms"])


def experts(folder: Path, device: str) -> Iterator[Sample]:
    """Yield a rank's experts with gated activations and equally many tokens each, from routed tokens on."""
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    for row in _rows(folder, "experts", device):
        tokens, hidden, inner, chosen, every, cut, ranks = shape = tuple(int(row[name]) for name in names)
        is_like = row["kernel_source"] == "moe_torch_flow_cutlass" and row["distribution"] == "balanced"
        if not is_like or row["moe_dtype"] not in _TYPES or not _is_held_out(*shape):
            continue
        is_fp8 = row["moe_dtype"] == "fp8"
        kernels = _kernels(device, **({"fp8": "hybrid"} if is_fp8 else {}))
        here, cut_inner, each = every / ranks, inner / cut, tokens * chosen / every
        seconds = kernels.product(each, 2 * cut_inner, hidden, groups=here)
        seconds += kernels.product(each, hidden, cut_inner, groups=here)
        seconds += kernels.copy(2 * here * each * (3 * hidden + 3 * cut_inner) + 4 * tokens * hidden)
        seconds += kernels.cast(here * each * (hidden + cut_inner)) + _EXPERTS_START
        name = f"experts in {_TYPES[row['moe_dtype']]}, {_tokens(each)} tokens each"
        yield name, device, 1e3 * seconds / float(row["ms"])


def _tokens(each: float) -> str:
    return "1,024 or more" if each >= 1024 else "128 to 1,023" if each >= 128 else "fewer than 128"


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
            seconds = _kernels(device).copy(4 * tokens * width)
            yield "Mamba-2's convolution", device, 1e3 * seconds / float(row["ms"])


_PARTS = (products, attention, latent_attention, collectives, experts, new_kinds)


def compared(folder: Path) -> dict[tuple[str, str], Found]:
    """Return what was found for each component and device of ``folder``."""
    ratios = defaultdict(list)
    for part in _PARTS:
        for device in _SYSTEMS:
            for name, of, ratio in part(folder, device):
                ratios[name, of].append(ratio)
    return {key: _found(values) for key, values in ratios.items() if len(values) > 1}


def _found(ratios: Sequence[float]) -> Found:
    parts, middle = quantiles(ratios, n=50, method="inclusive"), median(ratios)
    return Found(
        len(ratios), middle, parts[7], parts[41], median(abs(ratio / middle - 1) for ratio in ratios)
    )


def draw(path: Path, found: Mapping[tuple[str, str], Found]) -> None:
    """Draw the median and the spread of every component."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.22 * len(found) + 1), layout="constrained")
    axes = figure.add_subplot()
    for place, (_key, one) in enumerate(reversed(list(found.items()))):
        axes.plot((one.low, one.high), (place, place), color="C0", linewidth=4, alpha=0.4)
        axes.plot(one.median, place, "o", color="C0", markersize=4)
    axes.axvline(1, color="grey", linewidth=0.8)
    names = [f"{component}, {device}" for component, device in reversed(list(found))]
    axes.set(xscale="log", xlabel="planner over measured: the median, and 68 in 100 of the shapes")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    ticks = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    figure.savefig(path, dpi=120)


def main(
    kernels: Annotated[Path, typer.Argument(help="The folder of the tables.")],
    out: Out = RESULTS / "components.md",
    before: Annotated[Path | None, typer.Option(help="Medians and spreads to compare with.")] = None,
) -> None:
    """Write the table and the picture."""
    found = compared(kernels)
    old = json.loads(before.read_text(encoding="utf-8")) if before else {}
    rows: list[Row] = []
    for (component, device), one in found.items():
        was = old.get(f"{component}, {device}")
        goal = next((goal for name, goal in _GOALS.items() if name in component), _OTHERS)
        cells = (f"{was[0]:.2f}", f"{was[1]:.1%}") if was else ("", "")
        is_met = "met" if one.spread <= goal else "missed"
        now = (
            f"{one.median:.2f}",
            f"{one.spread:.1%}",
            f"{one.low:.2f} to {one.high:.2f}",
            f"{one.deviation:.1%}",
        )
        rows.append((component, device, one.shapes, *cells, *now, f"{goal:.0%}: {is_met}"))
    head = (
        "component",
        "device",
        "shapes",
        "median before",
        "spread before",
        "median",
        "spread",
        "68 in 100",
        "median deviation",
        "goal",
    )
    about = (
        "The planner's seconds of a component that runs alone, over those measured, for the shapes that took "
        "no part in fitting (half of them by a hash; of collectives, the sizes between the rows).  The "
        "spread is half of the range of the middle 68 of 100, over the median.  The tables are of "
        "ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a51)."
    )
    publish(
        out,
        "Parts of the cost model against measured kernels",
        about,
        table(head, rows),
        "![](components.png)",
    )
    if str(out) != "-":
        draw(out.with_suffix(".png"), found)


if __name__ == "__main__":
    typer.run(main)
