"""Published training runs with whole configurations, from ``training_runs.json``, which has their sources.

Each run is a job of Megatron's, or of a framework that trains as Megatron does, on GPUs of one kind, with the
seconds of a step as they were measured.  The planner is judged by them, and the few constants that are fitted
(``costs/systems``) are fitted to them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("training_runs.json")

_SIZES = {
    "seq": "seq_length",
    "gbs": "global_batch_size",
    "mbs": "micro_batch_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_MODEL = ("num_layers", "hidden_size", "num_attention_heads")
_ACTIVATIONS = {"gelu": False, "squared_relu": False, "swiglu": True, "geglu": True}


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A job in the planner's names, the GPUs that it ran on, and what was measured.

    ``publisher`` is who published it, with the year.  ``seconds`` are those of a step, or None where the
    source has none; ``memory`` is in GB as printed, and ``ran_out`` says that it did not fit.  ``node`` and
    ``network`` are a GPU's bytes a second within a node and to other nodes where they are not those of the
    shipped system.  ``framework`` has what the framework
    does unlike Megatron (``job.parts.Parallel``), and ``more_bytes`` are what it keeps for each
    weight of a rank beyond what Megatron keeps.  ``is_judged_by_memory`` is false where the source leaves
    open what memory holds.
    """

    source: str
    publisher: str
    name: str
    gpu: str
    gpus: int
    model: Mapping[str, Any]
    seconds: float | None
    memory: float | None
    ran_out: bool
    node: float | None
    network: float | None
    framework: Mapping[str, bool]
    more_bytes: float
    is_judged_by_memory: bool


@cache
def runs() -> tuple[PublishedRun, ...]:
    """Return all runs that the planner can describe, in the order of the file."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    found = []
    for group in content["groups"]:
        for values in group["rows"]:
            row = {**group["all"], **dict(zip(group["columns"], values, strict=True))}
            if not row.get("why_outside"):
                found.append(_run(group, row, content["models"]))
    return tuple(found)


def _run(group: Mapping[str, Any], row: Mapping[str, Any], models: Mapping[str, Any]) -> PublishedRun:
    shape = {**models[row["model"]], **{name: row[name] for name in _MODEL if row.get(name)}}
    if not shape["ffn_hidden_size"]:
        shape["ffn_hidden_size"] = 4 * shape["hidden_size"]
    described = dict(_described(group, row, shape))
    return PublishedRun(
        source=group["id"],
        publisher=f"{group['publisher']} {group['year']}",
        name=_name(row),
        gpu=row["gpu"],
        gpus=row["gpus"],
        model=described,
        seconds=_seconds(row, shape),
        memory=row.get("mem_gb"),
        ran_out=bool(row.get("oom")),
        node=group.get("node_bytes_per_second_per_gpu"),
        network=group.get("network_bytes_per_second_per_gpu"),
        framework=group.get("framework", {}),
        more_bytes=group.get("more_bytes_per_weight", {}).get(row["precision"], 0),
        is_judged_by_memory=not group.get("memory_not_judged"),
    )


def _described(
    group: Mapping[str, Any], row: Mapping[str, Any], shape: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that describe the job to the planner."""
    for name, value in shape.items():
        if name not in ("activation", "position") and value is not None:
            yield name, value
    yield "swiglu", _ACTIVATIONS[shape["activation"]]
    yield "group_query_attention", shape["num_query_groups"] != shape["num_attention_heads"]
    yield "max_position_embeddings", row["seq"]
    for short, name in _SIZES.items():
        if row.get(short) is not None:
            yield name, row[short]
    training = dict(group["training"])
    training |= training.pop("models", {}).get(row["model"], {})
    yield from training.items()
    is_fp16 = row["precision"] == "fp16"
    yield "fp16" if is_fp16 else "bf16", True
    if row["precision"].startswith("fp8"):
        # None says whether its weights were in FP8 too; five of them could not have run otherwise.
        yield from (("fp8", "hybrid"), ("fp8_param_gather", True))
        yield "fp8_recipe", "tensorwise" if row["precision"] == "fp8-cs" else "delayed"
    is_fused = training.get("attention_backend") != "unfused"
    yield "sequence_parallel", is_fused and (row.get("tp") or 1) > 1
    if row.get("recompute_modules"):
        yield from (("recompute_granularity", "selective"), ("recompute_modules", row["recompute_modules"]))
    if "tp-comm-overlap (userbuffers) is on" in group["assumed"]:
        is_off = "tp-comm-overlap off" in group["assumed"] or "tp overlap off" in group.get("note", "")
        yield "tp_comm_overlap", not is_off
    if "defer_embedding_wgrad_compute on" in group.get("note", ""):
        yield "defer_embedding_wgrad_compute", True
    if "dispatcher" in row:
        yield "moe_token_dispatcher_type", row["dispatcher"].split()[0]
    if row.get("ep_overlap"):
        yield "overlap_moe_expert_parallel_comm", True
    stages = (row.get("pp") or 1) * (row.get("vp") or 1)
    if shape["num_layers"] % stages:
        yield "account_for_embedding_in_pipeline_split", True
        yield "account_for_loss_in_pipeline_split", True


def _name(row: Mapping[str, Any]) -> str:
    """Return the job in a few words, with the sizes that differ within a group."""
    sizes = (
        f"{short}{row[short]}" for short in ("tp", "pp", "vp", "cp", "ep", "mbs", "gbs") if row.get(short)
    )
    shape = (
        f"{row[name]} {word}"
        for name, word in (("num_layers", "layers"), ("hidden_size", "wide"))
        if name in row
    )
    words = (row["model"], *shape, f"{row['gpus']} {row['gpu']}", row["precision"], *sizes)
    return " ".join((*words, *(str(row[name]) for name in ("dispatcher", "system") if name in row)))


def _seconds(row: Mapping[str, Any], shape: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step, computed where the source prints a rate."""
    if row.get("step_s"):
        return float(row["step_s"])
    tokens = row["gbs"] * row["seq"]
    if row.get("tokens_s_gpu"):
        return float(tokens / row["tokens_s_gpu"] / row["gpus"])
    if row.get("tflops_gpu"):
        return float(tokens * _operations(row["seq"], shape) / (1e12 * row["tflops_gpu"] * row["gpus"]))
    return None


def _operations(length: int, shape: Mapping[str, Any]) -> float:
    """Return the operations of a dense model's token as Megatron counts them: half of attention is masked."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    gates = 3 if _ACTIVATIONS[shape["activation"]] else 2
    attention = 2 * hidden * hidden * (1 + shape["num_query_groups"] / heads) + length * hidden
    layer = attention + gates * hidden * shape["ffn_hidden_size"]
    return 6.0 * (shape["num_layers"] * layer + hidden * shape["vocab_size"])
