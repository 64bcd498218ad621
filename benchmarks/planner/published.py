"""The planner's answers for the jobs of ``reference.published_runs``.  Nothing is fitted to them."""

from collections.abc import Mapping

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from reference.published_runs import MegatronRun


def megatron_step(run: MegatronRun, selective: bool) -> Estimate:
    """Estimate a step; recomputation is either ``selective``, with sequence parallelism, or full without.

    Megatron of 2022 divided messages among tensor-parallel ranks.
    """
    job = describe(
        {
            "num_layers": run.layers,
            "hidden_size": run.hidden,
            "num_attention_heads": run.heads,
            "seq_length": 2048,
            "max_position_embeddings": 2048,
            "vocab_size": 51200,
            "fp16": True,
            "micro_batch_size": run.microbatch,
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
    job = job.changed(scatter_gather_tensors_in_pipeline=True)
    machine = system.read("a100-80g")
    return estimate_request(job, machine, for_world(asked_of(job), 8 * run.pipeline))


def best_of_grid(length: int, family: str, batch: int = 160) -> Evaluated:
    """Search the best configuration for the 98.5B model under one schedule."""
    job = describe(
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
    space = Space(job, 40, machine.gpus_per_node, batch, (family,), fixed)
    return Search(space, machine, machine.memory_bytes, top=1).run().best[0]


def llama_step(name: str) -> Estimate:
    """Estimate a step of Llama2-7B under the schedule ``name``."""
    job = describe(
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
    return estimate_request(job, system.read("mi300x"), for_world(asked_of(job), 8))


def ranked(values: Mapping[str, float]) -> list[str]:
    """Return the names by rising value."""
    return sorted(values, key=lambda name: values[name])
