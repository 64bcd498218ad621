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


def has_other_hierarchy(job: RequestedJob) -> bool:
    """Whether the sizes of levels do not make the context-parallel size."""
    levels = job.flags.hierarchical_context_parallel_sizes
    return bool(levels) and math.prod(levels or ()) != job.parallel.context_parallel_size


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
        "is for training without a pipeline",
        "use --fine-grained-activation-offloading, or --pipeline-offload auto",
        when=lambda job: (
            job.memory.cpu_offloading_num_layers and job.parallel.pipeline_model_parallel_size > 1
        ),
    ),
    Rule(
        "--cpu-offloading-num-layers {cpu_offloading_num_layers}",
        "leaves no layer of --num-layers {num_layers} on the device",
        "lower it",
        when=lambda job: job.memory.cpu_offloading_num_layers >= job.model.num_layers > 0,
    ),
    Rule(
        "--cpu-offloading-num-layers",
        "cannot be combined with --recompute-granularity {recompute_granularity}",
        "leave one of them out",
        when=lambda job: job.memory.cpu_offloading_num_layers and job.memory.recompute_granularity,
    ),
    # Recomputation.
    Rule(
        "--recompute-granularity full",
        "does not say which layers",
        "add --recompute-method uniform or block",
        when=lambda job: job.memory.recomputes_layers and job.memory.recompute_method is None,
    ),
    Rule(
        "--recompute-granularity full",
        "does not say how many layers at a time",
        "add --recompute-num-layers 1",
        when=lambda job: job.memory.recomputes_layers and job.flags.recompute_num_layers is None,
    ),
    Rule(
        "--recompute-num-layers 0",
        "makes no groups of layers",
        "set it to 1 or more",
        when=lambda job: (
            job.memory.recomputes_layers
            and job.memory.recompute_method == "uniform"
            and job.memory.recompute_num_layers <= 0
        ),
    ),
    Rule(
        "--recompute-method",
        "is for --recompute-granularity full",
        "leave it out, or recompute whole layers",
        when=lambda job: (
            job.memory.recompute_granularity == "selective" and job.memory.recompute_method is not None
        ),
    ),
    Rule(
        "--recompute-num-layers",
        "is for --recompute-granularity full",
        "leave it out, or recompute whole layers",
        when=lambda job: (
            job.memory.recompute_granularity == "selective" and job.flags.recompute_num_layers is not None
        ),
    ),
    Rule(
        "--recompute-modules {unknown_modules}",
        "is none of Megatron's modules",
        "choose among {known_modules}",
        when=lambda job: job.memory.recompute_granularity == "selective" and unknown_modules(job),
        words=(known_modules, unknown_modules),
    ),
    Rule(
        "--recompute-modules moe_act",
        "needs --moe-grouped-gemm",
        "add it",
        when=lambda job: "moe_act" in job.memory.recomputed and not job.precision.moe_grouped_gemm,
    ),
    Rule(
        "--recompute-modules mla_up_proj",
        "is for --multi-latent-attention",
        "choose others",
        when=lambda job: "mla_up_proj" in job.memory.recomputed and not job.attention.multi_latent_attention,
    ),
    Rule(
        "--recompute-modules gdn_norm_out",
        "is for --experimental-attention-variant gated_delta_net",
        "choose others",
        when=lambda job: (
            "gdn_norm_out" in job.memory.recomputed
            and job.attention.experimental_attention_variant != "gated_delta_net"
        ),
    ),
    Rule(
        "--recompute-modules shared_experts",
        "has no meaning for --moe-shared-expert-overlap",
        "leave one of the two out",
        when=lambda job: (
            "shared_experts" in job.memory.recomputed
            and job.flags.moe_shared_expert_overlap
            and job.model.moe_shared_expert_intermediate_size
        ),
    ),
    Rule(
        "--recompute-modules moe_act or layernorm",
        "is not for --fp8-recipe delayed",
        "choose another recipe",
        when=lambda job: (
            not job.memory.recomputed.isdisjoint({"moe_act", "layernorm"})
            and job.precision.fp8
            and job.precision.fp8_recipe == "delayed"
        ),
    ),
    Rule(
        "--distribute-saved-activations",
        "is for --recompute-granularity full without --sequence-parallel",
        "leave it out",
        when=lambda job: job.memory.distribute_saved_activations and not can_distribute(job),
    ),
    # Numbers.
    Rule(
        "--fp32-residual-connection",
        "is for a model in half precision",
        "add --bf16, or leave it out",
        when=lambda job: job.precision.fp32_residual_connection and not job.precision.is_half,
    ),
    Rule(
        "--fp16-lm-cross-entropy",
        "is for --fp16",
        "leave it out",
        when=lambda job: job.flags.fp16_lm_cross_entropy and not job.precision.fp16,
    ),
    Rule(
        "--fp8-param-gather",
        "is for --fp8-format",
        "add it, or leave this out",
        when=lambda job: job.precision.fp8_param_gather and not job.precision.fp8,
    ),
    Rule(
        "--fp8-param-gather",
        "is for --use-distributed-optimizer",
        "add it, or leave this out",
        when=lambda job: job.precision.fp8_param_gather and not job.memory.use_distributed_optimizer,
    ),
    Rule(
        "--fp8-output-proj",
        "is for --fp8-format and --fp8-recipe mxfp8",
        "give both, or leave it out",
        when=lambda job: (
            job.flags.fp8_output_proj and not (job.precision.fp8 and job.precision.fp8_recipe == "mxfp8")
        ),
    ),
    Rule(
        "--first-last-layers-bf16",
        "is not for --fp8-recipe delayed",
        "choose another recipe, or leave it out",
        when=lambda job: (
            job.flags.first_last_layers_bf16 and job.precision.fp8 and job.precision.fp8_recipe == "delayed"
        ),
    ),
    # Kernels.
    Rule(
        "--use-te-activation-func",
        "takes the place of fused biases",
        "add --no-bias-gelu-fusion or --no-bias-swiglu-fusion",
        when=lambda job: job.flags.use_te_activation_func and fuses_bias(job),
    ),
    Rule(
        "--fused-residual-rmsnorm",
        "is for --normalization RMSNorm",
        "choose it, or leave this out",
        when=lambda job: job.flags.fused_residual_rmsnorm and job.model.normalization != "RMSNorm",
    ),
    Rule(
        "--cuda-graph-impl full_iteration",
        "cannot look at losses",
        "add --no-check-for-nan-in-loss-and-grad",
        when=lambda job: (
            job.precision.cuda_graph_impl == "full_iteration" and job.flags.check_for_nan_in_loss_and_grad
        ),
    ),
    # Exchanges.
    Rule(
        "--tp-comm-overlap",
        "is for --sequence-parallel",
        "add it with a --tensor-model-parallel-size above 1",
        when=lambda job: job.parallel.tp_comm_overlap and not job.is_set("--sequence-parallel"),
    ),
    Rule(
        "--overlap-param-gather",
        "is for --use-distributed-optimizer",
        "add it, or leave this out",
        when=lambda job: job.parallel.overlap_param_gather and not job.memory.shards_state,
    ),
    Rule(
        "--overlap-param-gather",
        "is for --overlap-grad-reduce",
        "add it, or leave this out",
        when=lambda job: job.parallel.overlap_param_gather and not job.parallel.overlap_grad_reduce,
    ),
    Rule(
        "--overlap-param-gather-with-optimizer-step",
        "is for --overlap-param-gather",
        "add it, or leave this out",
        when=lambda job: (
            job.flags.overlap_param_gather_with_optimizer_step and not job.parallel.overlap_param_gather
        ),
    ),
    Rule(
        "--delay-wgrad-compute",
        "is for --overlap-moe-expert-parallel-comm",
        "leave it out",
        when=lambda job: job.flags.delay_wgrad_compute and not job.parallel.overlap_moe_expert_parallel_comm,
    ),
    Rule(
        "--ep-overlap-early-attn-memory-release",
        "is for --overlap-moe-expert-parallel-comm",
        "leave it out",
        when=lambda job: (
            job.flags.ep_overlap_early_attn_memory_release
            and not job.parallel.overlap_moe_expert_parallel_comm
        ),
    ),
    Rule(
        "--overlap-p2p-communication-warmup-flush",
        "is for several chunks a rank",
        "leave it out",
        when=lambda job: job.flags.overlap_p2p_comm_warmup_flush and not has_chunk_flag(job),
    ),
    Rule(
        "--hierarchical-context-parallel-sizes",
        "do not make --context-parallel-size {context_parallel_size}",
        "give sizes whose product is that",
        when=has_other_hierarchy,
    ),
    Rule(
        "--cp-comm-type a2a+p2p",
        "exchanges on two levels of ranks",
        "give their sizes as --hierarchical-context-parallel-sizes, or choose another type",
        when=lambda job: (
            job.is_set("--cp-comm-type", "a2a+p2p") and not job.flags.hierarchical_context_parallel_sizes
        ),
    ),
    # The optimizer.
    Rule(
        "--optimizer-cpu-offload",
        "is for --use-precision-aware-optimizer",
        "add it",
        when=lambda job: job.memory.optimizer_cpu_offload and not job.flags.use_precision_aware_optimizer,
    ),
    Rule(
        "--use-precision-aware-optimizer",
        "is for --optimizer adam and --use-distributed-optimizer",
        "give both, or leave it out",
        when=lambda job: (
            job.flags.use_precision_aware_optimizer
            and not (job.memory.optimizer == "adam" and job.memory.use_distributed_optimizer)
        ),
    ),
    Rule(
        "{short_state}",
        "is for --use-precision-aware-optimizer",
        "add it",
        when=lambda job: short_state(job) and not job.flags.use_precision_aware_optimizer,
        words=(short_state,),
    ),
)
