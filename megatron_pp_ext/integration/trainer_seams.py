"""Where schedules enter megatron.training: its flags, its model and data, its loop, checkpoints and reports.

``core_seams`` says what a seam has.
"""

from megatron_pp_ext.integration.core import mirrored_chunks
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_18, CORE_0_19, CORE_0_20
from megatron_pp_ext.integration.trainer import (
    checkpoint_loading,
    layer_seeds,
    memory_report,
    parser,
    placed_data,
    replica_samples,
    same_request,
    stage_statistics,
    step_recording,
    validation,
)

_DISTRIBUTED = "get_embedding_ranks get_position_embedding_ranks store"

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
        {CORE_0_17: _DISTRIBUTED, CORE_0_19: f"{_DISTRIBUTED} skip_model_parallel_init"},
        same_request.compare_before_groups,
        "one schedule, from the same flags and files, on all ranks of the job",
    ),
)
"""The flags that request a schedule."""

_SEED = "seed_ data_parallel_random_init te_rng_tracker inference_rng_tracker use_cudagraphable_rng"
_SEED_GROUPS = f"{_SEED} pp_group dp_group tp_group ep_group etp_group"
_SEEDS = "initial weights that do not depend on the placement"

MODEL = (
    Seam(
        "megatron.training.training:get_model",
        {CORE_0_17: "model_provider_func model_type wrap_with_ddp config pg_collection"},
        lambda stock: layer_seeds.draw_chunks(mirrored_chunks.build_chunks_placed(stock)),
        "chunks of a V or wave from the other end, made by a model provider",
    ),
    Seam(
        "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
        {CORE_0_18: "build_model_func pg_collection vp_size model_type"},
        lambda stock: layer_seeds.draw_chunks(mirrored_chunks.build_chunks_placed(stock)),
        "chunks of a V or wave from the other end, made from a model config",
    ),
    Seam(
        "megatron.training.initialize:_set_random_seed",
        {
            CORE_0_17: _SEED,
            CORE_0_19: _SEED_GROUPS,
            CORE_0_20: f"{_SEED_GROUPS} gtp_remat_group egtp_remat_group",
        },
        layer_seeds.remember_seeding,
        _SEEDS,
    ),
    Seam(
        "megatron.core.transformer.spec_utils:build_module",
        {CORE_0_17: "spec_or_module args kwargs"},
        layer_seeds.draw_layer,
        _SEEDS,
    ),
    Seam(
        "megatron.training.training:build_train_valid_test_data_iterators",
        {CORE_0_17: "build_train_valid_test_datasets_provider"},
        placed_data.provide_data_placed,
        "data for the stages that a V puts on this rank",
    ),
    Seam(
        "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__init__",
        {
            CORE_0_17: "self total_samples consumed_samples micro_batch_size data_parallel_rank "
            "data_parallel_size drop_last"
        },
        replica_samples.take_turns,
        "microbatches that the replicas of a stage take in turn",
    ),
)
"""The model's chunks, their initial weights and their data."""

_TRAIN_STEP = (
    "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func "
    "iteration"
)
_BASE_CHECKPOINT = "load_dir args rank0 sharded_state_dict checkpointing_context"

LOOP = (
    Seam(
        "megatron.training.utils:logical_and_across_model_parallel_group",
        {CORE_0_17: "input", CORE_0_19: "input group"},
        stage_statistics.keep_within_stage,
        "updates of a pipeline that never flushes",
    ),
    Seam(
        "megatron.training.utils:reduce_max_stat_across_model_parallel_group",
        {CORE_0_17: "stat", CORE_0_19: "stat group"},
        stage_statistics.keep_within_stage,
        "logs of a pipeline that never flushes",
    ),
    Seam(
        "megatron.training.checkpointing:_load_base_checkpoint",
        {
            CORE_0_17: _BASE_CHECKPOINT,
            CORE_0_19: f"{_BASE_CHECKPOINT} dp_cp_group expt_dp_group gpt_compat_layer_maps",
        },
        checkpoint_loading.load_placed,
        "state for the stages of this rank, a copy of it for each tied weight",
    ),
    Seam(
        "megatron.training.training:train_step",
        {CORE_0_17: _TRAIN_STEP, CORE_0_19: f"{_TRAIN_STEP} pg_collection p2p_communicator"},
        step_recording.record_step,
        "losses and gradients that mpp verify compares",
    ),
)
"""Updates, logs, checkpoints and records of the training loop."""

_REPORT = "megatron.training.theoretical_memory_usage"
_TRUE_REPORT = "a true report of theoretical memory"

MEMORY_REPORT = (
    Seam(
        f"{_REPORT}:compute_weight_and_optimizer_memory",
        {CORE_0_17: "args verbose"},
        memory_report.weights_of_both_ends,
        _TRUE_REPORT,
    ),
    *(
        Seam(
            f"{_REPORT}:{name}",
            {CORE_0_17: "args num_microbatches verbose"},
            memory_report.activations_as_scheduled,
            _TRUE_REPORT,
        )
        for name in ("compute_activation_memory", "compute_activation_memory_without_sp")
    ),
)
"""Megatron's own report of theoretical memory."""

TRAINER = (*FLAGS, *MODEL, *LOOP, *MEMORY_REPORT)
