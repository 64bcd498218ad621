"""Every place where this package enters Megatron-LM, and all that it knows of Megatron's releases.

A seam tells where, what parameters are there and since which release, what goes in its place
and what for; ``patching`` checks and replaces.  Those that only a machine without a GPU needs are in
``cpu.seams``.
"""

from megatron_pp_ext.integration.patching import KNOWN_RELEASES, Seam

_17, _18, _19, _20 = KNOWN_RELEASES

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
_LINEAR = (
    "ctx input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
    "wgrad_deferral_limit tp_group"
)


def all_seams(cpu: bool = False) -> tuple[Seam, ...]:
    """What the launcher replaces, on a machine without a GPU or on another."""
    return (*launch_seams(cpu), *schedule_seams())


def launch_seams(cpu: bool) -> tuple[Seam, ...]:
    """What lets a training script run where it otherwise would not, under any schedule."""
    from megatron_pp_ext.cpu.seams import cpu_seams
    from megatron_pp_ext.integration.hooks import dataset_helpers, skipped_steps

    return (
        Seam(
            "megatron.core.datasets.utils",
            "compile_helpers",
            {_17: ""},
            dataset_helpers.skip_if_built,
            "a wheel has the helpers built and no Makefile",
        ),
        Seam(
            "megatron.training.training",
            "dummy_train_step",
            {_17: "data_iterator"},
            skipped_steps.pass_over,
            "--iterations-to-skip on every rank that reads samples, and on those that do not",
        ),
        *(cpu_seams() if cpu else ()),
    )


def schedule_seams() -> tuple[Seam, ...]:
    """What brings schedules into a training run, in the order in which the run passes it."""
    from megatron_pp_ext.integration.hooks import (
        checkpoint_placement,
        data_parallel,
        local_linear,
        memory_report,
        mirrored_chunks,
        stage_optimizer,
    )
    from megatron_pp_ext.integration.request import parser, validation
    from megatron_pp_ext.integration.runners import choose, tracing

    return (
        Seam(
            "megatron.training.arguments",
            "add_megatron_arguments",
            {_17: "parser"},
            parser.add_flags,
            "the --pipeline-schedule flags",
        ),
        Seam(
            "megatron.training.arguments",
            "validate_args",
            {_17: "args defaults"},
            validation.translate_flags,
            "a schedule in Megatron's own terms, before Megatron checks them",
        ),
        Seam(
            "megatron.training.yaml_arguments",
            "validate_yaml",
            {_17: "args defaults"},
            validation.refuse_yaml,
            "no schedule without its flags translated",
        ),
        Seam(
            "megatron.core.parallel_state",
            "initialize_model_parallel",
            {
                _17: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}"
                "create_all_gather_group rank_offset local_world_size",
                _18: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}"
                "rank_offset local_world_size",
                _19: f"{_MODEL_PARALLEL_UP_TO_EXPERTS}gtp_remat_size expert_gtp_remat_size "
                f"{_MODEL_PARALLEL_UP_TO_SHARP_GROUP}rank_offset local_world_size",
            },
            mirrored_chunks.embed_on_first_rank,
            "under a V the first rank has both ends of the model",
        ),
        Seam(
            "megatron.training.training",
            "get_model",
            {_17: "model_provider_func model_type wrap_with_ddp config pg_collection"},
            mirrored_chunks.build_chunks_placed,
            "chunks of a V or wave from the other end, made by a model provider",
        ),
        Seam(
            "megatron.training.models.dist_utils",
            "build_virtual_pipeline_stages",
            {_18: "build_model_func pg_collection vp_size model_type"},
            mirrored_chunks.build_chunks_placed,
            "chunks of a V or wave from the other end, made from a model config",
        ),
        Seam(
            "megatron.training.training",
            "build_train_valid_test_data_iterators",
            {_17: "build_train_valid_test_datasets_provider"},
            mirrored_chunks.provide_data_placed,
            "data for the stages that a V puts on this rank",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "get_forward_backward_func",
            {_17: "pp_size vp_size", _19: "pp_size vp_size schedule_pg_collection"},
            choose.choose_schedule,
            "the schedule itself",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "forward_step",
            {
                _17: "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store "
                "config cp_group_size collect_non_loss_data checkpoint_activations_microbatch "
                "is_first_microbatch current_microbatch vp_stage is_last_stage"
            },
            tracing.record_forward,
            "--pipeline-trace of stock's schedules",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "backward_step",
            {_17: "input_tensor output_tensor output_tensor_grad config"},
            tracing.record_backward,
            "--pipeline-trace of stock's schedules",
        ),
        Seam(
            "megatron.core.distributed.param_and_grad_buffer",
            "_ParamAndGradBucketGroup.start_grad_sync",
            {_17: "self force_all_reduce"},
            tracing.record_reduction_start,
            "--pipeline-trace of gradient reduction",
        ),
        Seam(
            "megatron.core.distributed.param_and_grad_buffer",
            "_ParamAndGradBucketGroup.finish_grad_sync",
            {_17: "self force_all_reduce"},
            tracing.record_reduction_end,
            "--pipeline-trace of gradient reduction",
        ),
        Seam(
            "megatron.core.tensor_parallel.layers",
            "LinearWithGradAccumulationAndAsyncCommunication",
            {
                _17: _LINEAR,
                _19: f"{_LINEAR} gtp_remat_size",
                _20: f"{_LINEAR} gtp_remat_size output_dtype",
            },
            local_linear.split_backward,
            "the backward in two halves",
        ),
        Seam(
            "megatron.core.distributed.distributed_data_parallel",
            "DistributedDataParallel._make_backward_post_hook",
            {_17: "self param"},
            data_parallel.count_when_complete,
            "reduction of a gradient once its second half is in",
        ),
        Seam(
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            {_17: "model config embd_group pp_group"},
            mirrored_chunks.sum_tied_gradients,
            "tied weights whose two copies are on one rank",
        ),
        Seam(
            "megatron.core.optimizer.clip_grads",
            "get_grad_norm_fp32",
            {_17: "grads_for_norm norm_type grad_stats_parallel_group"},
            stage_optimizer.sum_within_stage,
            "gradient norms of a pipeline that never flushes",
        ),
        Seam(
            "megatron.core.optimizer.clip_grads",
            "count_zeros_fp32",
            {
                _17: "parameters grad_stats_parallel_group use_decoupled_grad tp_group",
                _19: "parameters grad_stats_parallel_group use_decoupled_grad tp_group expert_tp_group",
            },
            stage_optimizer.sum_within_stage,
            "counts of zeros in a pipeline that never flushes",
        ),
        Seam(
            "megatron.training.utils",
            "logical_and_across_model_parallel_group",
            {_17: "input", _19: "input group"},
            stage_optimizer.keep_to_oneself,
            "updates of a pipeline that never flushes",
        ),
        Seam(
            "megatron.training.utils",
            "reduce_max_stat_across_model_parallel_group",
            {_17: "stat", _19: "stat group"},
            stage_optimizer.keep_to_oneself,
            "logs of a pipeline that never flushes",
        ),
        Seam(
            "megatron.training.theoretical_memory_usage",
            "compute_weight_and_optimizer_memory",
            {_17: "args verbose"},
            memory_report.weights_of_both_ends,
            "a true report of theoretical memory",
        ),
        Seam(
            "megatron.training.theoretical_memory_usage",
            "compute_activation_memory",
            {_17: "args num_microbatches verbose"},
            memory_report.activations_as_scheduled,
            "a true report of theoretical memory",
        ),
        Seam(
            "megatron.training.theoretical_memory_usage",
            "compute_activation_memory_without_sp",
            {_17: "args num_microbatches verbose"},
            memory_report.activations_as_scheduled,
            "a true report of theoretical memory",
        ),
        Seam(
            "megatron.core.dist_checkpointing.strategies.fully_parallel",
            "distribute_main_replicas_with_precomputed_distribution",
            {_17: "sharded_state_dict parallelization_group precomputed_distribution"},
            checkpoint_placement.write_copies_once,
            "checkpoints of tied weights whose two copies are on one rank",
        ),
        Seam(
            "megatron.training.checkpointing",
            "_load_base_checkpoint",
            {
                _17: "load_dir args rank0 sharded_state_dict checkpointing_context",
                _19: "load_dir args rank0 sharded_state_dict checkpointing_context dp_cp_group expt_dp_group "
                "gpt_compat_layer_maps",
            },
            checkpoint_placement.load_placed,
            "state for the stages of this rank, a copy of it for each tied weight",
        ),
    )
