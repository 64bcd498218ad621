"""Where schedules enter megatron.core: placement, the step, updates, checkpoints and what is recorded.

Each seam names the place, the parameters that it has since which release, the hook that goes there, and what
the hook is for.
"""

from megatron_pp_ext.integration.core import (
    action_recording,
    checkpoint_copies,
    chunk_pipelines,
    data_parallel,
    late_checks,
    local_linear,
    mirrored_chunks,
    nesterov,
    offload_order,
    one_chunk_pairs,
    placed_functions,
    placed_models,
    planned_weights,
    replicated_ranks,
    stage_optimizer,
)
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_18, CORE_0_19, CORE_0_20
from megatron_pp_ext.integration.runners import choose

_SIZES = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "pipeline_model_parallel_comm_backend use_sharp context_parallel_size "
    "hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size"
)
_GROUPS = (
    "num_distributed_optimizer_instances expert_tensor_parallel_size nccl_communicator_config_path "
    "distributed_timeout_minutes order get_embedding_ranks get_position_embedding_ranks "
    "create_gloo_process_groups high_priority_stream_groups sharp_enabled_group"
)
_RANKS = "rank_offset local_world_size"

PLACEMENT = (
    Seam(
        "megatron.core.parallel_state:initialize_model_parallel",
        {
            CORE_0_17: f"{_SIZES} {_GROUPS} create_all_gather_group {_RANKS}",
            CORE_0_18: f"{_SIZES} {_GROUPS} {_RANKS}",
            CORE_0_19: f"{_SIZES} gtp_remat_size expert_gtp_remat_size {_GROUPS} {_RANKS}",
        },
        lambda stock: replicated_ranks.initialize_replicas(mirrored_chunks.embed_on_first_rank(stock)),
        "under a V the first rank has both ends of the model; replicas have groups of their own",
    ),
    Seam(
        "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        {CORE_0_17: "model config embd_group pp_group"},
        mirrored_chunks.sum_tied_gradients,
        "tied weights whose two copies are on one rank",
    ),
    Seam(
        "megatron.core.parallel_state:RankGenerator.get_ranks",
        {CORE_0_17: "self token"},
        replicated_ranks.list_groups,
        "process groups for stages with different numbers of replicas",
    ),
    Seam(
        "megatron.core.optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group",
        {CORE_0_17: "self"},
        replicated_ranks.keep_statistics_in_replica,
        "clipping where the ranks of a stage are in several pipelines",
    ),
)
"""The stages that a placement puts on this rank: groups, tied gradients, replicas."""

_GPT = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_base rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor mtp_block_spec pg_collection vp_stage"
)
_PATTERN = (
    "vocab_size max_sequence_length hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio "
    "hybrid_override_pattern pre_process post_process fp16_lm_cross_entropy parallel_output "
    "share_embeddings_and_output_weights position_embedding_type rotary_percent rotary_base "
    "scatter_embedding_sequence_parallel seq_len_interpolation_factor pg_collection vp_stage"
)
_CHUNK = "chunks of a V or wave from the other end, whoever builds them"

MODELS = (
    Seam(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        {CORE_0_17: _GPT, CORE_0_20: f"{_GPT} logit_dtype"},
        placed_models.build_placed,
        _CHUNK,
    ),
    Seam(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
        {
            CORE_0_18: f"self config hybrid_stack_spec {_PATTERN}",
            CORE_0_20: f"self config hybrid_stack_spec {_PATTERN} logit_dtype",
        },
        placed_models.build_placed,
        _CHUNK,
    ),
    # Later ones make it of a HybridModel.
    Seam(
        "megatron.core.models.mamba.mamba_model:MambaModel.__init__",
        {CORE_0_17: f"self config mamba_stack_spec {_PATTERN}", CORE_0_18: None},
        placed_models.build_placed,
        _CHUNK,
    ),
)
"""Models that another trainer than Megatron's builds."""

ANSWERS = tuple(
    Seam(
        f"megatron.core.{place}",
        {CORE_0_17: parameters},
        placed_functions.by_placement,
        "layers and ends of a chunk, for whoever asks while it is not at work",
    )
    for place, parameters in (
        ("transformer.transformer_block:get_num_layers_to_build", "config vp_stage pp_rank"),
        ("transformer.transformer_layer:get_transformer_layer_offset", "config vp_stage pp_rank"),
        (
            "models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
            "config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank",
        ),
        (
            "models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
            "config spec use_transformer_engine vp_stage pp_rank",
        ),
        ("parallel_state:is_pipeline_first_stage", "ignore_virtual vp_stage"),
        ("parallel_state:is_pipeline_last_stage", "ignore_virtual vp_stage"),
    )
)
"""Functions about the layers of a chunk."""

_LINEAR = (
    "ctx input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
    "wgrad_deferral_limit tp_group"
)
_PLANNED = "weight gradients of a backward in a pair, while tokens travel"

STEP = (
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
    Seam(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        {CORE_0_17: "self"},
        lambda stock: chunk_pipelines.mark_config(one_chunk_pairs.check_as_one_virtual_stage(stock)),
        "pairs under schedules of one chunk a rank; the pipeline of the models of a config",
    ),
    Seam(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager.get_instance",
        {CORE_0_17: ""},
        offload_order.serve,
        "--fine-grained-activation-offloading in the order of any schedule",
    ),
    Seam(
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode.backward_dw",
        {CORE_0_17: "self", CORE_0_19: None},
        planned_weights.run_where_planned,
        _PLANNED,
    ),
    Seam(
        "megatron.core.models.common.utils:TransformerLayerNode.backward_dw",
        {CORE_0_19: "self"},
        planned_weights.run_where_planned,
        _PLANNED,
    ),
)
"""The step: which actions run in which order, with the backward in two halves, and pairs of actions."""

_ZEROS = "parameters grad_stats_parallel_group use_decoupled_grad tp_group"

UPDATES = (
    Seam(
        "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        {CORE_0_17: "grads_for_norm norm_type grad_stats_parallel_group"},
        stage_optimizer.sum_within_stage,
        "gradient norms of a pipeline that never flushes",
    ),
    Seam(
        "megatron.core.optimizer.clip_grads:count_zeros_fp32",
        {CORE_0_17: _ZEROS, CORE_0_19: f"{_ZEROS} expert_tp_group"},
        stage_optimizer.sum_within_stage,
        "counts of zeros in a pipeline that never flushes",
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
        checkpoint_copies.write_copies_once,
        "checkpoints of tied weights whose two copies are on one rank",
    ),
)
"""Checkpoints of a rank that has both ends of a model."""

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_OF_STOCK, _OF_REDUCTION = "--pipeline-trace of stock's schedules", "--pipeline-trace of gradient reduction"

RECORDS = (
    Seam(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        {
            CORE_0_17: "forward_step_func data_iterator model num_microbatches input_tensor "
            "forward_data_store config cp_group_size collect_non_loss_data "
            "checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage is_last_stage"
        },
        action_recording.record_forward,
        _OF_STOCK,
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules:backward_step",
        {CORE_0_17: "input_tensor output_tensor output_tensor_grad config"},
        action_recording.record_backward,
        _OF_STOCK,
    ),
    Seam(
        f"{_BUCKETS}.start_grad_sync",
        {CORE_0_17: "self force_all_reduce"},
        action_recording.record_reduction_start,
        _OF_REDUCTION,
    ),
    Seam(
        f"{_BUCKETS}.finish_grad_sync",
        {CORE_0_17: "self force_all_reduce"},
        action_recording.record_reduction_end,
        _OF_REDUCTION,
    ),
    Seam(
        "megatron.core.pipeline_parallel.utils:ScheduleNode.stream_acquire_context",
        {CORE_0_17: "self name"},
        action_recording.record_exchange,
        "--pipeline-trace of exchanges of tokens",
    ),
)
"""What is recorded for a trace, without a change to what a run does."""

CORE = (*PLACEMENT, *MODELS, *ANSWERS, *STEP, *UPDATES, *CHECKPOINTS, *RECORDS)
