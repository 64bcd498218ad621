"""Every place where this package enters Megatron-LM, grouped by what it is for.

Each seam names the place, the parameters that it has since which release, the hook that goes there, and
what the hook is for. ``patching`` checks and replaces them, ``mpp doctor`` lists them. Those that only a
machine without a GPU needs are in ``cpu_seams``, those that mend the training loop in ``loop_seams``,
those of pairs in ``pair_seams``, those of replicated stages in ``replica_seams``, those of seeds by layer
in ``seed_seams``, and those that only record in ``record_seams``.
This imports Megatron.
"""

from megatron_pp_ext.integration.core import (
    checkpoint_placement,
    data_parallel,
    late_checks,
    local_linear,
    mirrored_chunks,
    nesterov,
    replicated_ranks,
    stage_optimizer,
)
from megatron_pp_ext.integration.cpu_seams import CPU
from megatron_pp_ext.integration.loop_seams import LOOP
from megatron_pp_ext.integration.mends import (
    bucket_padding,
    dataset_helpers,
    resumed_learning_rate,
    skipped_steps,
    stage_data,
)
from megatron_pp_ext.integration.pair_seams import PAIRS
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.record_seams import RECORDS
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_18, CORE_0_19, CORE_0_20
from megatron_pp_ext.integration.replica_seams import REPLICAS
from megatron_pp_ext.integration.request import parser, same_request, validation
from megatron_pp_ext.integration.runners import choose
from megatron_pp_ext.integration.seed_seams import LAYER_SEEDS
from megatron_pp_ext.integration.trainer import memory_report


def all_seams(cpu: bool = False) -> tuple[Seam, ...]:
    """Return what the launcher replaces, with ``cpu`` on a machine without a GPU."""
    return (*launch_seams(cpu), *schedule_seams())


def launch_seams(cpu: bool) -> tuple[Seam, ...]:
    """Return what lets a training script run where it otherwise would not, under any schedule."""
    return (*LAUNCH, *LOOP, *CPU) if cpu else (*LAUNCH, *LOOP)


def schedule_seams() -> tuple[Seam, ...]:
    """Return what brings schedules into a training run."""
    return (
        *FLAGS,
        *PLACEMENT,
        *LAYER_SEEDS,
        *SCHEDULE,
        *PAIRS,
        *UPDATES,
        *REPLICAS,
        *CHECKPOINTS,
        *RECORDS,
        *MEMORY_REPORT,
    )


_BATCH_ON_TENSOR_PARALLEL_RANK = (
    "is_hybrid_cp create_attention_mask_in_dataloader broadcast_src_rank broadcast_group cp_size tp_rank "
    "micro_batch_size seq_length mtp_on_this_rank pipeline_model_parallel_size is_pipeline_first_stage "
    "is_pipeline_last_stage"
)

LAUNCH = (
    Seam(
        "megatron.core.datasets.utils:compile_helpers",
        {CORE_0_17: ""},
        dataset_helpers.skip_if_built,
        "a wheel has the helpers built and no Makefile",
    ),
    Seam(
        "megatron.training.training:dummy_train_step",
        {CORE_0_17: "data_iterator"},
        skipped_steps.pass_over,
        "--iterations-to-skip on every rank that reads samples, and on those that do not",
    ),
    Seam(
        "megatron.training.utils:is_first_or_last_pipeline_stage",
        {CORE_0_17: "vp_stage"},
        stage_data.read_on_every_stage,
        "attention within documents on the stages between the ends",
    ),
    Seam(
        "megatron.training.utils:get_batch_on_this_tp_rank",
        {CORE_0_17: "data_iterator mtp_on_this_rank", CORE_0_18: None},
        stage_data.send_whole_batch,
        "attention within documents on every tensor-parallel rank",
    ),
    Seam(
        "megatron.core.utils:get_batch_on_this_tp_rank",
        {
            CORE_0_18: f"batch is_sft {_BATCH_ON_TENSOR_PARALLEL_RANK}",
            CORE_0_19: f"batch has_cu_seqlens {_BATCH_ON_TENSOR_PARALLEL_RANK}",
        },
        stage_data.send_whole_batch,
        "attention within documents on every tensor-parallel rank",
    ),
    Seam(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set",
        {CORE_0_17: "self cls_value sd_value name"},
        resumed_learning_rate.name_the_flag,
        "the flag that allows a resumed run another --train-iters",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer"
        ":DistributedOptimizer.sharded_param_state_fully_reshardable",
        {CORE_0_17: "self model_sharded_state_dict is_loading metadata"},
        bucket_padding.count_without_padding,
        "--dist-ckpt-optim-fully-reshardable where gradients are in several buckets",
    ),
)
"""What Megatron needs under any schedule."""

FLAGS = (
    Seam(
        "megatron.training.arguments:add_megatron_arguments",
        {CORE_0_17: "parser"},
        parser.add_flags,
        "the --pipeline-schedule flags",
    ),
    Seam(
        "megatron.training.arguments:validate_args",
        {CORE_0_17: "args defaults"},
        validation.translate_flags,
        "a schedule in Megatron's own terms, before Megatron checks them",
    ),
    Seam(
        "megatron.training.yaml_arguments:validate_yaml",
        {CORE_0_17: "args defaults"},
        validation.refuse_yaml,
        "no schedule without its flags translated",
    ),
    Seam(
        "megatron.training.initialize:_initialize_distributed",
        {
            CORE_0_17: "get_embedding_ranks get_position_embedding_ranks store",
            CORE_0_19: "get_embedding_ranks get_position_embedding_ranks store skip_model_parallel_init",
        },
        same_request.compare_before_groups,
        "one schedule, from the same flags and files, on all ranks of the job",
    ),
)
"""The flags that request a schedule."""

_MODEL_PARALLEL_UP_TO_EXPERTS = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "pipeline_model_parallel_comm_backend use_sharp context_parallel_size "
    "hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size "
)
_MODEL_PARALLEL_UP_TO_SHARP_GROUP = (
    "num_distributed_optimizer_instances expert_tensor_parallel_size nccl_communicator_config_path "
    "distributed_timeout_minutes order get_embedding_ranks get_position_embedding_ranks "
    "create_gloo_process_groups high_priority_stream_groups sharp_enabled_group "
)

PLACEMENT = (
    Seam(
        "megatron.core.parallel_state:initialize_model_parallel",
        {
            CORE_0_17: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}"
            "create_all_gather_group rank_offset local_world_size",
            CORE_0_18: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}"
            "rank_offset local_world_size",
            CORE_0_19: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}gtp_remat_size expert_gtp_remat_size "
            f"{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}rank_offset local_world_size",
        },
        lambda stock: replicated_ranks.initialize_replicas(mirrored_chunks.embed_on_first_rank(stock)),
        "under a V the first rank has both ends of the model; replicas have groups of their own",
    ),
    Seam(
        "megatron.training.training:get_model",
        {CORE_0_17: "model_provider_func model_type wrap_with_ddp config pg_collection"},
        mirrored_chunks.build_chunks_placed,
        "chunks of a V or wave from the other end, made by a model provider",
    ),
    Seam(
        "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
        {CORE_0_18: "build_model_func pg_collection vp_size model_type"},
        mirrored_chunks.build_chunks_placed,
        "chunks of a V or wave from the other end, made from a model config",
    ),
    Seam(
        "megatron.training.training:build_train_valid_test_data_iterators",
        {CORE_0_17: "build_train_valid_test_datasets_provider"},
        mirrored_chunks.provide_data_placed,
        "data for the stages that a V puts on this rank",
    ),
    Seam(
        "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        {CORE_0_17: "model config embd_group pp_group"},
        mirrored_chunks.sum_tied_gradients,
        "tied weights whose two copies are on one rank",
    ),
)
"""The stages that a placement puts on this rank: their weights, data and tied gradients."""

_LINEAR = (
    "ctx input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
    "wgrad_deferral_limit tp_group"
)

SCHEDULE = (
    Seam(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        {CORE_0_17: "pp_size vp_size", CORE_0_19: "pp_size vp_size schedule_pg_collection"},
        choose.choose_runner,
        "the schedule itself",
    ),
    Seam(
        "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        {CORE_0_17: "self result rejection_func message comparison_func tolerance fatal"},
        late_checks.check_late,
        "checks of losses and gradients for which the host does not wait between two actions",
    ),
    Seam(
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication",
        {
            CORE_0_17: _LINEAR,
            CORE_0_19: f"{_LINEAR} gtp_remat_size",
            CORE_0_20: f"{_LINEAR} gtp_remat_size output_dtype",
        },
        local_linear.split_backward,
        "the backward in two halves",
    ),
    Seam(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
        {CORE_0_17: "self param"},
        data_parallel.count_when_complete,
        "reduction of a gradient once its second half is in",
    ),
)
"""The step: which actions run in which order, with the backward in two halves."""

UPDATES = (
    Seam(
        "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        {CORE_0_17: "grads_for_norm norm_type grad_stats_parallel_group"},
        stage_optimizer.sum_within_stage,
        "gradient norms of a pipeline that never flushes",
    ),
    Seam(
        "megatron.core.optimizer.clip_grads:count_zeros_fp32",
        {
            CORE_0_17: "parameters grad_stats_parallel_group use_decoupled_grad tp_group",
            CORE_0_19: "parameters grad_stats_parallel_group use_decoupled_grad tp_group expert_tp_group",
        },
        stage_optimizer.sum_within_stage,
        "counts of zeros in a pipeline that never flushes",
    ),
    Seam(
        "megatron.training.utils:logical_and_across_model_parallel_group",
        {CORE_0_17: "input", CORE_0_19: "input group"},
        stage_optimizer.keep_within_stage,
        "updates of a pipeline that never flushes",
    ),
    Seam(
        "megatron.training.utils:reduce_max_stat_across_model_parallel_group",
        {CORE_0_17: "stat", CORE_0_19: "stat group"},
        stage_optimizer.keep_within_stage,
        "logs of a pipeline that never flushes",
    ),
    Seam(
        "megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
        {CORE_0_17: "self optimizer config init_state_fn"},
        nesterov.look_ahead_by_momentum,
        "--pipeline-delay-correction nesterov in a pipeline that never flushes",
    ),
)
"""Weights that each stage of a pipeline without a flush updates by itself."""

CHECKPOINTS = (
    Seam(
        "megatron.core.dist_checkpointing.strategies.fully_parallel"
        ":distribute_main_replicas_with_precomputed_distribution",
        {CORE_0_17: "sharded_state_dict parallelization_group precomputed_distribution"},
        checkpoint_placement.write_copies_once,
        "checkpoints of tied weights whose two copies are on one rank",
    ),
    Seam(
        "megatron.training.checkpointing:_load_base_checkpoint",
        {
            CORE_0_17: "load_dir args rank0 sharded_state_dict checkpointing_context",
            CORE_0_19: "load_dir args rank0 sharded_state_dict checkpointing_context dp_cp_group "
            "expt_dp_group gpt_compat_layer_maps",
        },
        checkpoint_placement.load_placed,
        "state for the stages of this rank, a copy of it for each tied weight",
    ),
)
"""Checkpoints that know where stages live."""

MEMORY_REPORT = (
    Seam(
        "megatron.training.theoretical_memory_usage:compute_weight_and_optimizer_memory",
        {CORE_0_17: "args verbose"},
        memory_report.weights_of_both_ends,
        "a true report of theoretical memory",
    ),
    Seam(
        "megatron.training.theoretical_memory_usage:compute_activation_memory",
        {CORE_0_17: "args num_microbatches verbose"},
        memory_report.activations_as_scheduled,
        "a true report of theoretical memory",
    ),
    Seam(
        "megatron.training.theoretical_memory_usage:compute_activation_memory_without_sp",
        {CORE_0_17: "args num_microbatches verbose"},
        memory_report.activations_as_scheduled,
        "a true report of theoretical memory",
    ),
)
"""Megatron's own report of theoretical memory."""
