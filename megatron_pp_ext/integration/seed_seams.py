"""The places where --pipeline-layer-seeds decides what a part of the model is drawn from.

They are seams like those in ``seams``, which lists them with its own.
"""

from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_18, CORE_0_19, CORE_0_20
from megatron_pp_ext.integration.trainer import layer_seeds

_SEED = "seed_ data_parallel_random_init te_rng_tracker inference_rng_tracker use_cudagraphable_rng"
_SEED_GROUPS = f"{_SEED} pp_group dp_group tp_group ep_group etp_group"
_LAYER = (
    "self config submodules layer_number hidden_dropout pg_collection vp_stage is_mtp_layer add_layer_offset "
    "pp_layer_offset"
)
_MAMBA_LAYER = "self config submodules layer_number pg_collection pp_layer_offset"
_PREDICTION = "self config submodules layer_number vp_stage pg_collection mtp_layer_pattern"
_EMBEDDING = (
    "self config vocab_size max_sequence_length position_embedding_type num_tokentypes "
    "scatter_to_sequence_parallel tp_group"
)
_GPT_UP_TO_LOSS = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy"
)
_GPT_OTHERS = (
    "parallel_output share_embeddings_and_output_weights position_embedding_type rotary_percent rotary_base "
    "rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel seq_len_interpolation_factor "
    "mtp_block_spec pg_collection vp_stage"
)
_HYBRID_UP_TO_LOSS = (
    "vocab_size max_sequence_length hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio "
    "hybrid_override_pattern pre_process post_process fp16_lm_cross_entropy"
)
_HYBRID_OTHERS = (
    "parallel_output share_embeddings_and_output_weights position_embedding_type rotary_percent rotary_base "
    "scatter_embedding_sequence_parallel seq_len_interpolation_factor pg_collection vp_stage"
)
_WHY = "initial weights that do not depend on the placement"

LAYER_SEEDS = (
    Seam(
        "megatron.training.initialize:_set_random_seed",
        {
            CORE_0_17: _SEED,
            CORE_0_19: _SEED_GROUPS,
            CORE_0_20: f"{_SEED_GROUPS} gtp_remat_group egtp_remat_group",
        },
        layer_seeds.remember_seeding,
        _WHY,
    ),
    Seam(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        {
            CORE_0_17: f"{_GPT_UP_TO_LOSS} {_GPT_OTHERS}",
            CORE_0_20: f"{_GPT_UP_TO_LOSS} logit_dtype {_GPT_OTHERS}",
        },
        layer_seeds.draw_model,
        _WHY,
    ),
    Seam(
        "megatron.core.models.mamba.mamba_model:MambaModel.__init__",
        {CORE_0_17: f"self config mamba_stack_spec {_HYBRID_UP_TO_LOSS} {_HYBRID_OTHERS}", CORE_0_18: None},
        layer_seeds.draw_model,
        _WHY,
    ),
    Seam(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
        {
            CORE_0_18: f"self config hybrid_stack_spec {_HYBRID_UP_TO_LOSS} {_HYBRID_OTHERS}",
            CORE_0_20: f"self config hybrid_stack_spec {_HYBRID_UP_TO_LOSS} logit_dtype {_HYBRID_OTHERS}",
        },
        layer_seeds.draw_model,
        _WHY,
    ),
    Seam(
        "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.__init__",
        {CORE_0_17: _EMBEDDING, CORE_0_20: f"{_EMBEDDING} pg_collection"},
        layer_seeds.draw_embedding,
        _WHY,
    ),
    Seam(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        {CORE_0_17: _LAYER, CORE_0_18: f"{_LAYER} name"},
        layer_seeds.draw_layer,
        _WHY,
    ),
    Seam(
        "megatron.core.ssm.mamba_layer:MambaLayer.__init__",
        {CORE_0_17: _MAMBA_LAYER, CORE_0_18: f"{_MAMBA_LAYER} name"},
        layer_seeds.draw_layer,
        _WHY,
    ),
    Seam(
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
        {
            CORE_0_17: f"{_PREDICTION} mamba_submodules",
            CORE_0_18: f"{_PREDICTION} hybrid_submodules mamba_submodules name",
        },
        layer_seeds.draw_prediction,
        _WHY,
    ),
)
"""Each part of the model, and the seeding of a rank."""
