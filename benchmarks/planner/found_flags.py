"""The flags of a row of Megatron-Bridge's summaries, with flags of its recipe that the row leaves out.

Recipes are those of scripts/performance at the tags from v0.1.0 to v0.6.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_pp_ext.job.flag_table import by_name

type Summary = Mapping[str, Any]
"""A row as ``bridge.json`` has it."""

_EVERY = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te")
"""Flags that every recipe sets (``_set_common_perf_overrides``)."""

_FUSED = (
    "--use-transformer-engine-op-fuser",
    "--moe-paged-stash",
    "--moe-expert-rank-capacity-factor",
    "1.5",
)
"""What recipes set with ``cutedsl_fused_grouped_mlp`` and graphs of whole iterations (v0.5.0,
``set_workload_base_configs`` and ``set_full_iter_cg_configs``)."""

_LAYOUTS = {8: "Et*8|(t*8|)*6t*5{}L", 16: "Et*4|(t*4|)*14t{}L", 32: "Et|(tt|)*30{}L"}
"""The layers of DeepSeek-V3 on so many stages, with a place for multi-token prediction (``layout_map`` of its
recipe, and ``deepseek_v3_h100_config``)."""

_PLAIN = [
    "--bf16",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--grad-reduce-in-bf16",
    "--attention-dropout",
    "0.0",
    "--hidden-dropout",
    "0.0",
]

_FORMATS = {
    "bf16": "",
    "fp8": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "fp8-cs": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "fp8-mx": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "fp8 (the other quantization granularity of the row)": (
        "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather"
    ),
}

_SIZES = {
    "seq": ("--seq-length", "--max-position-embeddings"),
    "mbs": ("--micro-batch-size",),
    "gbs": ("--global-batch-size",),
    "tp": ("--tensor-model-parallel-size",),
    "pp": ("--pipeline-model-parallel-size",),
    "vp": ("--num-virtual-stages-per-pipeline-rank",),
    "cp": ("--context-parallel-size",),
    "ep": ("--expert-model-parallel-size",),
}

_SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
_ON_HOST = {("llama3-70b", "gb300"): 20, ("llama3-70b", "gb200"): 40}
"""The layers whose activations go to the host (``cpu_offloading_num_layers``)."""

_EXPERTS = (
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 "
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    "--recompute-granularity selective"
)
_DROPPED = (
    "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0 "
    "--moe-pad-expert-input-to-capacity --recompute-modules mla_up_proj --mtp-num-layers 1"
)
"""``apply_moe_token_drop``, with v0.1.0's ``run_script.py``."""

_WITHOUT_PREDICTION = {
    "gb200": "--recompute-modules mla_up_proj",
    "gb300": "--recompute-modules moe_act",
}
"""Presets of v0.2.0 (configs/deepseek/workload_base_configs.py)."""


_AS_RUN = {
    164: "--micro-batch-size 1 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5",
    166: "--micro-batch-size 1 --num-virtual-stages-per-pipeline-rank 5",
    262: "--micro-batch-size 1",
    263: "--micro-batch-size 1 --num-virtual-stages-per-pipeline-rank 12",
    268: "--micro-batch-size 1",
}
"""Rows of Megatron-Bridge's summaries that print other sizes than were run, by their index.

Those of 268 and 262 contradict their batch and its number of accumulated microbatches (16 of 16 samples, 2 of
32).  The recipes at the releases' tags have these sizes for all five, and the tables of container 26.02 print
them for 164 and 166.  The printed ones of all but 263 fit on none of their GPUs."""


def flags_of(row: Summary) -> Sequence[str]:
    """Return the flags of ``row``, or its recipe's where it has none."""
    words = list(row.get("flags") or _of_recipe(row))
    if row["model"] == "deepseek-v3" and "--pipeline-model-parallel-layout" not in words:
        words = [*_even(words), *_layout(row, "m")]
    fused = _FUSED if row.get("cfg", {}).get("cutedsl_fused_grouped_mlp") else ()
    return (*words, *_EVERY, *fused, *_AS_RUN.get(row["index"], "").split())


def model_of(row: Summary) -> str:
    """Return the name under which the planner knows the model of ``row``."""
    return str(row.get("mpp_model") or ("deepseek-v3" if "DeepSeekV3" in row["model"] else row["model"]))


def _of_recipe(row: Summary) -> Iterator[str]:
    yield from _PLAIN
    has_layout = "DeepSeek" in row["model"]
    for size, names in _SIZES.items():
        if row.get(size) and not (size == "ep" and row[size] == 1) and not (size == "vp" and has_layout):
            for name in names:
                yield from (name, str(row[size]))
    yield from _FORMATS[row["precision"]].split()
    if row.get("fsdp"):
        yield from _SHARDED.split()
        if (row["model"], row["gpu"]) in _ON_HOST:
            yield from ("--cpu-offloading-num-layers", str(_ON_HOST[row["model"], row["gpu"]]))
    if "tokendrop" in row["model"]:
        yield from f"{_EXPERTS} {_DROPPED}".split()
        yield from _layout(row, "m")
    elif "w/o MTP" in row["model"]:
        graphs = "--mtp-num-layers 0 --cuda-graph-impl transformer_engine"
        sent = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
        yield from f"{_EXPERTS} {sent} {graphs} {_WITHOUT_PREDICTION[row['gpu']]}".split()
        yield from _layout(row, "")


def _even(words: Sequence[str]) -> list[str]:
    """Return the flags without the number of stages a rank, which a layout has."""
    values_by_name = by_name(words)
    return [word for name, values in values_by_name if name not in _SIZES["vp"] for word in (name, *values)]


def _layout(row: Summary, predicting: str) -> Sequence[str]:
    stages = row["pp"] * (row.get("vp") or 1)
    return "--pipeline-model-parallel-layout", _LAYOUTS[stages].format(predicting)
