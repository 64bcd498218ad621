"""What Megatron refuses of recomputation, numbers, kernels, exchanges and the optimizer when it starts.

These are assertions of ``validate_args`` (megatron.training.arguments) or of the config of the model, the
optimizer or the gradients.
"""

import math

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule
from megatron_pp_ext.job.rules.start_model import fuses_bias
from megatron_pp_ext.job.rules.start_stages import has_chunk_flag

MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)
"""The modules that Megatron can recompute (``TransformerConfig.recompute_modules``)."""


def unknown_modules(job: RequestedJob) -> str:
    """Return the modules to be recomputed that Megatron does not have; empty without one."""
    return " ".join(sorted({*job.memory.recompute_modules} - {*MODULES}))


def known_modules(job: RequestedJob) -> str:
    """Return the modules that can be recomputed, in words."""
    return ", ".join(MODULES)


def can_distribute(job: RequestedJob) -> bool:
    """Whether tensor-parallel ranks can each save a part of the input of recomputed layers."""
    parallel = job.parallel
    is_shared = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    return is_shared and job.memory.recomputes_layers


def has_mxfp8(job: RequestedJob) -> bool:
    """Whether products are computed in MXFP8."""
    return bool(job.precision.fp8) and job.precision.fp8_recipe == "mxfp8"


def has_other_hierarchy(job: RequestedJob) -> bool:
    """Whether the sizes of levels do not make the context-parallel size."""
    levels = job.flags.hierarchical_context_parallel_sizes
    return bool(levels) and math.prod(levels or ()) != job.parallel.context_parallel_size


def can_be_precision_aware(job: RequestedJob) -> bool:
    """Whether the optimizer is one whose state may have fewer bits."""
    return job.memory.optimizer == "adam" and job.memory.use_distributed_optimizer


def short_state(job: RequestedJob) -> str:
    """Return the flag that gives the optimizer's state fewer bits; empty without one."""
    own = job.memory
    for flag, format_of_numbers in (
        ("--main-grads-dtype", job.flags.main_grads_dtype),
        ("--main-params-dtype", own.main_params_dtype),
        ("--exp-avg-dtype", own.exp_avg_dtype),
        ("--exp-avg-sq-dtype", own.exp_avg_sq_dtype),
    ):
        if format_of_numbers not in (None, "fp32"):
            return flag
    return ""


ROWS = (
    # Activations on the host.
    Rule(
        "--cpu-offloading-num-layers",
        when=lambda job: (
            job.memory.cpu_offloading_num_layers and job.parallel.pipeline_model_parallel_size > 1
        ),
        why="is for training without a pipeline",
        fix="use --fine-grained-activation-offloading, or --pipeline-offload auto",
    ),
    Rule(
        "--cpu-offloading-num-layers {cpu_offloading_num_layers}",
        when=lambda job: job.memory.cpu_offloading_num_layers >= job.model.num_layers > 0,
        why="leaves no layer of --num-layers {num_layers} on the device",
        fix="lower it",
    ),
    Rule(
        "--cpu-offloading-num-layers",
        when=lambda job: job.memory.cpu_offloading_num_layers and job.memory.recompute_granularity,
        why="cannot be combined with --recompute-granularity {recompute_granularity}",
        fix="leave one of them out",
    ),
    # Recomputation.
    Rule(
        "--recompute-granularity full",
        when=lambda job: job.memory.recomputes_layers and job.memory.recompute_method is None,
        why="does not say which layers",
        fix="add --recompute-method uniform or block",
    ),
    Rule(
        "--recompute-granularity full",
        when=lambda job: job.memory.recomputes_layers and job.flags.recompute_num_layers is None,
        why="does not say how many layers at a time",
        fix="add --recompute-num-layers 1",
    ),
    Rule(
        "--recompute-num-layers 0",
        when=lambda job: (
            job.memory.recomputes_layers
            and job.memory.recompute_method == "uniform"
            and job.memory.recompute_num_layers <= 0
        ),
        why="makes no groups of layers",
        fix="set it to 1 or more",
    ),
    Rule(
        "--recompute-method",
        when=lambda job: (
            job.memory.recompute_granularity == "selective" and job.memory.recompute_method is not None
        ),
        why="is for --recompute-granularity full",
        fix="leave it out, or recompute whole layers",
    ),
    Rule(
        "--recompute-num-layers",
        when=lambda job: (
            job.memory.recompute_granularity == "selective" and job.flags.recompute_num_layers is not None
        ),
        why="is for --recompute-granularity full",
        fix="leave it out, or recompute whole layers",
    ),
    Rule(
        "--recompute-modules {unknown_modules}",
        when=lambda job: job.memory.recompute_granularity == "selective" and unknown_modules(job),
        why="is none of Megatron's modules",
        fix="choose among {known_modules}",
        words=(
            known_modules,
            unknown_modules,
        ),
    ),
    Rule(
        "--recompute-modules moe_act",
        when=lambda job: "moe_act" in job.memory.recomputed and not job.precision.moe_grouped_gemm,
        why="needs --moe-grouped-gemm",
        fix="add it",
    ),
    Rule(
        "--recompute-modules mla_up_proj",
        when=lambda job: "mla_up_proj" in job.memory.recomputed and not job.attention.multi_latent_attention,
        why="is for --multi-latent-attention",
        fix="choose others",
    ),
    Rule(
        "--recompute-modules gdn_norm_out",
        when=lambda job: (
            "gdn_norm_out" in job.memory.recomputed
            and job.attention.experimental_attention_variant != "gated_delta_net"
        ),
        why="is for --experimental-attention-variant gated_delta_net",
        fix="choose others",
    ),
    Rule(
        "--recompute-modules shared_experts",
        when=lambda job: (
            "shared_experts" in job.memory.recomputed
            and job.flags.moe_shared_expert_overlap
            and job.model.moe_shared_expert_intermediate_size
        ),
        why="has no meaning for --moe-shared-expert-overlap",
        fix="leave one of the two out",
    ),
    Rule(
        "--recompute-modules moe_act or layernorm",
        when=lambda job: (
            not job.memory.recomputed.isdisjoint({"moe_act", "layernorm"})
            and job.precision.fp8
            and job.precision.fp8_recipe == "delayed"
        ),
        why="is not for --fp8-recipe delayed",
        fix="choose another recipe",
    ),
    Rule(
        "--distribute-saved-activations",
        when=lambda job: job.memory.distribute_saved_activations and not can_distribute(job),
        why="is for --recompute-granularity full without --sequence-parallel",
        fix="leave it out",
    ),
    # Numbers.
    Rule(
        "--fp32-residual-connection",
        when=lambda job: job.precision.fp32_residual_connection and not job.precision.is_half,
        why="is for a model in half precision",
        fix="add --bf16, or leave it out",
    ),
    Rule(
        "--fp16-lm-cross-entropy",
        when=lambda job: job.flags.fp16_lm_cross_entropy and not job.precision.fp16,
        why="is for --fp16",
        fix="leave it out",
    ),
    Rule(
        "--fp8-param-gather",
        when=lambda job: job.precision.fp8_param_gather and not job.precision.fp8,
        why="is for --fp8-format",
        fix="add it, or leave this out",
    ),
    Rule(
        "--fp8-param-gather",
        when=lambda job: job.precision.fp8_param_gather and not job.memory.use_distributed_optimizer,
        why="is for --use-distributed-optimizer",
        fix="add it, or leave this out",
    ),
    Rule(
        "--fp8-output-proj",
        when=lambda job: job.flags.fp8_output_proj and not has_mxfp8(job),
        why="is for --fp8-format and --fp8-recipe mxfp8",
        fix="give both, or leave it out",
    ),
    Rule(
        "--first-last-layers-bf16",
        when=lambda job: (
            job.flags.first_last_layers_bf16 and job.precision.fp8 and job.precision.fp8_recipe == "delayed"
        ),
        why="is not for --fp8-recipe delayed",
        fix="choose another recipe, or leave it out",
    ),
    # Kernels.
    Rule(
        "--use-te-activation-func",
        when=lambda job: job.flags.use_te_activation_func and fuses_bias(job),
        why="takes the place of fused biases",
        fix="add --no-bias-gelu-fusion or --no-bias-swiglu-fusion",
    ),
    Rule(
        "--fused-residual-rmsnorm",
        when=lambda job: job.flags.fused_residual_rmsnorm and job.model.normalization != "RMSNorm",
        why="is for --normalization RMSNorm",
        fix="choose it, or leave this out",
    ),
    Rule(
        "--cuda-graph-impl full_iteration",
        when=lambda job: (
            job.precision.cuda_graph_impl == "full_iteration" and job.flags.check_for_nan_in_loss_and_grad
        ),
        why="cannot look at losses",
        fix="add --no-check-for-nan-in-loss-and-grad",
    ),
    # Exchanges.
    Rule(
        "--tp-comm-overlap",
        when=lambda job: job.parallel.tp_comm_overlap and not job.is_set("--sequence-parallel"),
        why="is for --sequence-parallel",
        fix="add it with a --tensor-model-parallel-size above 1",
    ),
    Rule(
        "--overlap-param-gather",
        when=lambda job: job.parallel.overlap_param_gather and not job.memory.shards_state,
        why="is for --use-distributed-optimizer",
        fix="add it, or leave this out",
    ),
    Rule(
        "--overlap-param-gather",
        when=lambda job: job.parallel.overlap_param_gather and not job.parallel.overlap_grad_reduce,
        why="is for --overlap-grad-reduce",
        fix="add it, or leave this out",
    ),
    Rule(
        "--overlap-param-gather-with-optimizer-step",
        when=lambda job: (
            job.flags.overlap_param_gather_with_optimizer_step and not job.parallel.overlap_param_gather
        ),
        why="is for --overlap-param-gather",
        fix="add it, or leave this out",
    ),
    Rule(
        "--delay-wgrad-compute",
        when=lambda job: job.flags.delay_wgrad_compute and not job.parallel.overlap_moe_expert_parallel_comm,
        why="is for --overlap-moe-expert-parallel-comm",
        fix="leave it out",
    ),
    Rule(
        "--ep-overlap-early-attn-memory-release",
        when=lambda job: (
            job.flags.ep_overlap_early_attn_memory_release
            and not job.parallel.overlap_moe_expert_parallel_comm
        ),
        why="is for --overlap-moe-expert-parallel-comm",
        fix="leave it out",
    ),
    Rule(
        "--overlap-p2p-communication-warmup-flush",
        when=lambda job: job.flags.overlap_p2p_comm_warmup_flush and not has_chunk_flag(job),
        why="is for several chunks a rank",
        fix="leave it out",
    ),
    Rule(
        "--hierarchical-context-parallel-sizes",
        when=has_other_hierarchy,
        why="do not make --context-parallel-size {context_parallel_size}",
        fix="give sizes whose product is that",
    ),
    # The optimizer.
    Rule(
        "--optimizer-cpu-offload",
        when=lambda job: job.memory.optimizer_cpu_offload and not job.flags.use_precision_aware_optimizer,
        why="is for --use-precision-aware-optimizer",
        fix="add it",
    ),
    Rule(
        "--use-precision-aware-optimizer",
        when=lambda job: job.flags.use_precision_aware_optimizer and not can_be_precision_aware(job),
        why="is for --optimizer adam and --use-distributed-optimizer",
        fix="give both, or leave it out",
    ),
    Rule(
        "{short_state}",
        when=lambda job: short_state(job) and not job.flags.use_precision_aware_optimizer,
        why="is for --use-precision-aware-optimizer",
        fix="add it",
        words=(short_state,),
    ),
)
