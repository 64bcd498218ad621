"""What an estimate and a search refuse themselves, although training leaves it to Megatron.

What Megatron refuses when it starts is asked of the installed one (``job.ask_megatron``).  Rules about
stages are here all the same, since a search tries pipelines and chunks that no flag sets, and cannot ask for
each of thousands of candidates.
"""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules


def chunk_flag(job: RequestedJob) -> str:
    """Return the flag by which Megatron cuts a rank's layers into chunks; empty without one."""
    return next(filter(job.is_set, layers.CHUNKS), "")


def described_twice(job: RequestedJob) -> str:
    """Return the flag that spreads layers over stages in another way than a pattern; empty without one."""
    others = (*layers.SPREAD[len(layers.ENDS) :], *layers.CHUNKS, layers.LAYOUT)
    return next(filter(job.is_set, others), "")


def ends_alone(job: RequestedJob) -> str:
    """Return the flag that gives an end of a pipeline its layers where there is none; empty without one."""
    is_alone = job.parallel.pipeline_model_parallel_size == 1
    return next(iter(layers.given_ends(job)), "") if is_alone else ""


RULES = (
    Rules(
        title="In `mpp estimate` and `mpp search`, about stages",
        rows=(
            Rule(
                "--num-layers-per-virtual-pipeline-stage",
                "says the same as --num-virtual-stages-per-pipeline-rank",
                "leave one of the two out",
                when=lambda job: (
                    job.pipeline.num_layers_per_virtual_pipeline_stage is not None
                    and job.pipeline.num_virtual_stages_per_pipeline_rank is not None
                ),
            ),
            Rule(
                "--pipeline-model-parallel-layout",
                "says how many chunks a rank has",
                "leave {chunk_flag} out",
                when=lambda job: job.pipeline.has_layout and chunk_flag(job),
                words=(chunk_flag,),
            ),
            Rule(
                "{described_twice}",
                "is not for --hybrid-layer-pattern, whose | are between stages",
                "leave it out",
                when=lambda job: job.model.hybrid_layer_pattern and described_twice(job),
                words=(described_twice,),
            ),
            Rule(
                "{ends_alone}",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=ends_alone,
                words=(ends_alone,),
            ),
            Rule(
                "{chunk_flag}",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=lambda job: (
                    job.parallel.pipeline_model_parallel_size <= 1
                    and chunk_flag(job)
                    and (layers.chunks_requested(job) or 1) > 1
                ),
                words=(chunk_flag,),
            ),
            Rule(
                "--defer-embedding-wgrad-compute",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=lambda job: (
                    job.parallel.defer_embedding_wgrad_compute
                    and job.parallel.pipeline_model_parallel_size <= 1
                ),
            ),
            Rule(
                "--cpu-offloading-num-layers",
                "is for training without a pipeline",
                "use --fine-grained-activation-offloading, or --pipeline-offload auto",
                when=lambda job: (
                    job.memory.cpu_offloading_num_layers and job.parallel.pipeline_model_parallel_size > 1
                ),
            ),
        ),
    ),
    Rules(
        title="In `mpp estimate` and `mpp search`, where Megatron starts and computes something else",
        rows=(
            Rule(
                "--recompute-num-layers 0",
                "makes no groups of layers",
                "set it to 1 or more",
                when=lambda job: (
                    job.memory.recomputes_layers
                    and job.memory.recompute_method == "uniform"
                    and job.argument("recompute_num_layers") == 0
                ),
            ),
            Rule(
                "--moe-expert-capacity-factor 0",
                "drops every token",
                "raise it",
                when=lambda job: job.model.expert_capacity == 0,
            ),
            Rule(
                "--fp8-format",
                "with weights in fp32 is not modelled",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: job.precision.fp8 and not job.precision.is_half,
            ),
            Rule(
                "--fp8-format",
                "has no effect on --transformer-impl local, whose products are not in FP8",
                "leave one of the two out",
                when=lambda job: job.precision.fp8 and job.precision.transformer_impl == "local",
            ),
            Rule(
                "--attention-backend {attention_backend}",
                "has no kernel for fp32",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: (
                    job.precision.attention_backend in ("flash", "fused") and not job.precision.is_half
                ),
            ),
        ),
    ),
)
