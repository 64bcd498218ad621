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

    barrier_with_L1_time: bool | None = None
    ckpt_format: str | None = None
    dataloader_type: str | None = None
    delay_wgrad_compute: bool | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    fake_process_group: bool | None = None
    fine_grained_activation_offloading: bool | None = None
    full_validation: bool | None = None
    loss_scale: float | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    multiple_validation_sets: bool | None = None
    overlap_p2p_comm: bool | None = None
    overlap_p2p_comm_warmup_flush: bool | None = None
    pipeline_layer_seeds: bool | None = None
    pipeline_order: Literal["given", "rule", "search"] | None = None
    pipeline_profile_steps: str | None = None
    pipeline_unproved: bool | None = None
    profile_pipeline: Path | None = None
    rehearse_pipeline: Path | None = None
    save: str | None = None
    spec: list[str] | None = None
    tensor_parallel_num_weight_shards: int | None = None
    timing_log_level: int | None = None
    tokenizer_model: str | None = None
    tokenizer_type: str | None = None
    train_iters: int | None = None
    use_tp_pp_dp_mapping: bool | None = None

    @classmethod
    def of(cls, args: object) -> Self:
        """Return the flags of ``args``, which has arguments under their names."""
        return cls(**{field.name: getattr(args, field.name, None) for field in fields(cls)})
