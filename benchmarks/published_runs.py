"""Published measurements of whole training runs, and what the planner makes of the same jobs.

Nothing is fitted to them.  Where a source leaves something open, what was assumed is said beside it.
"""

from argparse import Namespace
from typing import Any, NamedTuple

from megatron_pp_ext.planner import system
from megatron_pp_ext.planner.search.best_first import Evaluated, Search
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.step.estimate import Estimate
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.whole import estimate_plan
from megatron_pp_ext.request.plan import plan_of


class Run(NamedTuple):
    """A row of arXiv 2205.05198, table 5: seconds of a step, all recomputed or attention proper alone."""

    name: str
    layers: int
    hidden: int
    heads: int
    pipeline: int
    chunks: int
    batch: int
    full: float
    selective: float


RUNS = (
    Run("22B", 48, 6144, 64, 1, 1, 4, 1.42, 1.10),
    Run("175B", 96, 12288, 96, 8, 3, 64, 18.13, 13.75),
    Run("530B", 105, 20480, 128, 35, 3, 280, 49.05, 37.83),
    Run("1T", 128, 25600, 160, 64, 1, 512, 94.42, 71.49),
)
"""On 8 tensor-parallel A100 80G a pipeline stage, sequences of 2048, microbatches of 1, without data
parallelism; attention in single operations, with dropout."""


def megatron_step(run: Run, selective: bool) -> Estimate:
    """The planner's step: sequence parallelism with selective recomputation, neither with full."""
    args = describe(
        {
            "num_layers": run.layers,
            "hidden_size": run.hidden,
            "num_attention_heads": run.heads,
            "seq_length": 2048,
            "max_position_embeddings": 2048,
            "vocab_size": 51200,
            "fp16": True,
            "micro_batch_size": 1,
            "global_batch_size": run.batch,
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": run.pipeline,
            "num_virtual_stages_per_pipeline_rank": run.chunks,
            "attention_backend": "unfused",
            "sequence_parallel": selective,
            "recompute_granularity": "selective" if selective else "full",
            "recompute_method": None if selective else "uniform",
        }
    )
    machine = system.read("a100-80g")
    return estimate_plan(args, machine, plan_of(args, 8 * run.pipeline))


FAMILIES = {"1F1B": "1f1b", "ZB-1P": "zb-h1", "V-Half": "v-half", "V-Min": "v-min", "V-ZB": "v-zb"}

GRID = {
    1024: {"1F1B": 49.81, "ZB-1P": 54.52, "V-Half": 52.60, "V-Min": 48.02, "V-ZB": 57.58},
    3072: {"1F1B": 57.25, "ZB-1P": 56.55, "V-Half": 60.34, "V-Min": 55.51, "V-ZB": 56.89},
}
"""arXiv 2405.15362: MFU in percent of the best of a grid search for 98.5B, by sequence length."""

GRID_ASSUMPTIONS = (
    "78 layers of 10240 (which makes 98.7B) and 80 heads, embedding and output layer each in the place of a "
    "layer, 40 A100 80G, batches of 160, fused attention, no dropout, no context parallelism, "
    "nothing recomputed"
)


def best_of_grid(length: int, family: str, batch: int = 160) -> Evaluated:
    """The planner's best configuration for the 98.5B model under one schedule."""
    args = describe(
        {
            "num_layers": 78,
            "hidden_size": 10240,
            "num_attention_heads": 80,
            "seq_length": length,
            "max_position_embeddings": length,
            "vocab_size": 50304,
            "bf16": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "untie_embeddings_and_output_weights": True,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
    )
    machine = system.read("a100-80g")
    fixed = ("context_parallel_size", "recompute_granularity")
    space = Space(args, 40, machine.gpus_per_node, batch, (family,), fixed)
    return Search(space, machine, machine.memory_bytes, top=1).run().best[0]


LLAMA = {
    "1F1B": ("1f1b", 10057, 16.3),
    "interleaved": ("interleaved", 10974, 21.4),
    "ZBV": ("v-zb", 11347, 18.1),
    "V-Half": ("v-half", 10894, 14.1),
    "V-Min": ("v-min", 8897, 11.9),
}
"""Llama2-7B, 8 pipeline ranks on a node of MI300X: schedule, tokens a second a GPU, GB.

Assumed: sequences of 4096 in microbatches of 1, 64 of them, bf16, fused attention."""


def llama_step(name: str) -> Estimate:
    """The planner's step of Llama2-7B."""
    args: Namespace = describe(
        {
            "num_layers": 32,
            "hidden_size": 4096,
            "ffn_hidden_size": 11008,
            "num_attention_heads": 32,
            "seq_length": 4096,
            "vocab_size": 32000,
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bf16": True,
            "micro_batch_size": 1,
            "global_batch_size": 64,
            "pipeline_model_parallel_size": 8,
            "pipeline_schedule": name,
        }
    )
    return estimate_plan(args, system.read("mi300x"), plan_of(args, 8))


def ranked(values: dict[str, Any]) -> list[str]:
    """Names by rising value."""
    return sorted(values, key=lambda name: values[name])
