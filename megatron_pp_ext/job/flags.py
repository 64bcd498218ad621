"""The flags of a job that no part of it has, as they are given.

A part of a job (``job.parts``) has what training computes and what an estimate counts.  These are asked for
in addition: by rules about what cannot be combined (``job.rules``), and where a job is started.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class Flags:
    """Arguments under Megatron's names; None where no flag gives one, or a release has no such flag."""

    add_position_embedding: bool | None = None
    apply_rope_fusion: bool | None = None
    barrier_with_L1_time: bool | None = None
    batch_invariant_mode: bool | None = None
    check_for_nan_in_loss_and_grad: bool | None = None
    ckpt_format: str | None = None
    dataloader_type: str | None = None
    delay_wgrad_compute: bool | None = None
    encoder_num_layers: int | None = None
    encoder_seq_length: int | None = None
    ep_overlap_early_attn_memory_release: bool | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    fake_process_group: bool | None = None
    fine_grained_activation_offloading: bool | None = None
    first_last_layers_bf16: bool | None = None
    fp16_lm_cross_entropy: bool | None = None
    fp8_output_proj: bool | None = None
    full_validation: bool | None = None
    fused_residual_rmsnorm: bool | None = None
    hierarchical_context_parallel_sizes: list[int] | None = None
    hybrid_override_pattern: str | None = None
    loss_scale: float | None = None
    main_grads_dtype: str | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    moe_enable_deepep: bool | None = None
    moe_expert_rank_capacity_factor: float | None = None
    moe_router_enable_expert_bias: bool | None = None
    moe_router_load_balancing_type: str | list[str] | None = None
    moe_router_padding_for_fp8: bool | None = None
    moe_router_padding_for_quantization: bool | None = None
    moe_router_pre_softmax: bool | None = None
    moe_router_score_function: str | None = None
    moe_shared_expert_overlap: bool | None = None
    moe_single_grouped_bias: bool | None = None
    moe_single_grouped_weight: bool | None = None
    moe_use_upcycling: bool | None = None
    mrope_section: list[int] | None = None
    multiple_validation_sets: bool | None = None
    no_rope_freq: int | list[int] | None = None
    overlap_p2p_comm: bool | None = None
    overlap_p2p_comm_warmup_flush: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    pipeline_layer_seeds: bool | None = None
    pipeline_order: Literal["given", "rule", "search"] | None = None
    pipeline_profile_steps: str | None = None
    pipeline_unproved: bool | None = None
    profile_pipeline: Path | None = None
    recompute_num_layers: int | None = None
    rehearse_pipeline: Path | None = None
    rope_type: str | None = None
    rotary_interleaved: bool | None = None
    save: str | None = None
    spec: list[str] | None = None
    tensor_parallel_num_weight_shards: int | None = None
    timing_log_level: int | None = None
    tokenizer_model: str | None = None
    tokenizer_type: str | None = None
    train_iters: int | None = None
    use_precision_aware_optimizer: bool | None = None
    use_te_activation_func: bool | None = None
    use_tp_pp_dp_mapping: bool | None = None

    @classmethod
    def of(cls, args: object) -> Self:
        """Return the flags of ``args``, which has arguments under their names."""
        return cls(**{field.name: getattr(args, field.name, None) for field in fields(cls)})
