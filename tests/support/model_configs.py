"""The content of config.json files of today's models, in part: sizes are facts that their makers publish."""

from typing import Any

Config = dict[str, Any]

LLAMA: Config = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "max_position_embeddings": 163840,
    "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32}, "quantization_config": {"quant_method": "fp8",
    "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V2_LITE: Config = {
    **DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
    "num_nextn_predict_layers": None, "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
DEEPSEEK_V32: Config = {
    **DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048,
}  # fmt: skip
KIMI_K2: Config = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "vocab_size": 163840,
    "rope_theta": 50000.0,
}  # fmt: skip
GLM_5: Config = {
    **DEEPSEEK_V32, "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "qk_head_dim": 256, "v_head_dim": 256, "head_dim": 64, "index_n_heads": 32, "rope_scaling": None,
    "rope_theta": None, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "n_group": 1,
    "topk_group": 1, "indexer_rope_interleave": True,
}  # fmt: skip
GLM_45_AIR: Config = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": False,
    "partial_rotary_factor": 0.5, "rope_theta": 1000000, "max_position_embeddings": 131072,
    "intermediate_size": 10944, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "vocab_size": 151552,
}  # fmt: skip
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072, "vocab_size": 201088, "router_aux_loss_coef": 0.9,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
MINIMAX_M2: Config = {
    "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 256,
    "num_experts_per_tok": 8, "rotary_dim": 64, "rope_theta": 5000000, "scoring_func": "sigmoid",
    "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "use_mtp": True,
    "num_mtp_modules": 3, "mtp_transformer_layers": 1, "shared_intermediate_size": 0,
    "attn_type_list": [1] * 62, "max_position_embeddings": 196608, "vocab_size": 200064,
}  # fmt: skip
GEMMA_2_9B: Config = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_27B: Config = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "query_pre_attn_scalar": 168,
    },
}  # fmt: skip
QWEN2_7B: Config = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "use_sliding_window": False,
    "sliding_window": 131072, "max_window_layers": 28, "max_position_embeddings": 131072,
    "rope_theta": 1000000.0, "vocab_size": 152064,
}  # fmt: skip
QWEN2_MOE: Config = {
    **QWEN2_7B, "model_type": "qwen2_moe", "intermediate_size": 18944, "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480, "num_experts": 64, "num_experts_per_tok": 8,
    "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
QWEN3_MOE: Config = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_window_layers": 94, "use_sliding_window": False, "sliding_window": None,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "vocab_size": 151936,
}  # fmt: skip
QWEN3_NEXT: Config = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "full_attention_interval": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "intermediate_size": 5120,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "norm_topk_prob": True, "max_position_embeddings": 262144,
    "rope_theta": 10000000, "vocab_size": 151936, "use_sliding_window": False,
}  # fmt: skip
QWEN35_MOE: Config = {
    "model_type": "qwen3_5_moe", "image_token_id": 248056, "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen3_5_moe"},
    "text_config": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_section": [11, 11, 10], "rope_theta": 10000000, "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 262144, "vocab_size": 248320,
    },
}  # fmt: skip
NEMOTRON_3_NANO: Config = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "moe_intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "conv_kernel": 4, "expand": 2, "chunk_size": 128, "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu", "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
    "mamba_proj_bias": False, "layer_norm_epsilon": 1e-5, "residual_in_fp32": False,
    "time_step_limit": [0.0, float("inf")], "max_position_embeddings": 262144, "vocab_size": 131072,
    "rope_theta": 10000, "sliding_window": None,
}  # fmt: skip
NEMOTRON_3_SUPER: Config = {
    **NEMOTRON_3_NANO, "hidden_size": 4096, "num_hidden_layers": None, "hybrid_override_pattern": None,
    "layers_block_type": ["mamba", "moe", "attention", "moe"] * 2, "n_routed_experts": 512,
    "num_experts_per_tok": 22, "intermediate_size": 2688, "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "routed_scaling_factor": 5.0,
    "mamba_num_heads": 128, "num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E",
}  # fmt: skip
LLAMA_4_MAVERICK: Config = {
    "model_type": "llama4", "boi_token_index": 200080, "vision_config": {"model_type": "llama4_vision_model"},
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": False, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_local_experts": 128,
        "num_experts_per_tok": 1, "attention_chunk_size": 8192, "no_rope_layers": [],
        "moe_layers": list(range(1, 48, 2)), "for_llm_compressor": False, "attn_temperature_tuning": 4,
        "floor_scale": 8192, "attn_scale": 0.1, "max_position_embeddings": 1048576, "vocab_size": 202048,
        "rope_theta": 500000.0,
    },
}  # fmt: skip
MISTRAL_7B: Config = {
    **LLAMA, "model_type": "mistral", "sliding_window": 4096, "vocab_size": 32000, "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
}  # fmt: skip
MIXTRAL: Config = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False,
}  # fmt: skip
PHI_3_MINI: Config = {
    **LLAMA, "model_type": "phi3", "hidden_size": 3072, "num_key_value_heads": 32, "intermediate_size": 8192,
    "vocab_size": 32064, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": 2047, "rope_scaling": None,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
}  # fmt: skip
SMOLLM3: Config = {
    **LLAMA, "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
    "layer_types": ["full_attention"] * 36, "use_sliding_window": False,
}  # fmt: skip
MINITRON: Config = {
    "model_type": "nemotron", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "hidden_act": "relu2",
    "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "vocab_size": 256000,
}  # fmt: skip
QWEN2_VL: Config = {
    **QWEN2_7B, "model_type": "qwen2_vl", "vision_config": {"depth": 32}, "vision_token_id": 151654,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
KIMI_K25: Config = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1152}, "text_config": KIMI_K2}
QWEN35_27B: Config = {
    **QWEN3_NEXT, "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 17408, "mlp_only_layers": [],
    "linear_num_value_heads": 48, "mtp_num_hidden_layers": 1, "moe_intermediate_size": None,
    "num_experts": None, "shared_expert_intermediate_size": None, "num_experts_per_tok": None,
    "norm_topk_prob": None,
}  # fmt: skip
DOTS_1: Config = {
    "model_type": "dots1", "hidden_size": 4096, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": None, "max_position_embeddings": 32768, "vocab_size": 152064,
}  # fmt: skip
GPT_2: Config = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
    "n_inner": None, "vocab_size": 50257, "activation_function": "gelu_new", "summary_type": "cls_index",
}  # fmt: skip
old_keys: Config = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False,
    "tf_legacy_loss": False,
}  # fmt: skip
"""What Transformers 4 wrote for every model."""
GLM_52: Config = {
    **GLM_5, "vocab_size": 154880, "intermediate_size": 12288, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True,
    "index_topk_pattern": "".join("F" if layer < 3 or layer % 4 == 2 else "S" for layer in range(78)),
}  # fmt: skip
QWEN3_CODER_480B: Config = {
    **QWEN3_MOE, "hidden_size": 6144, "num_hidden_layers": 62, "num_attention_heads": 96,
    "num_key_value_heads": 8, "intermediate_size": 8192, "moe_intermediate_size": 2560, "num_experts": 160,
    "max_window_layers": 62, "max_position_embeddings": 262144, "rope_theta": 10000000, "qkv_bias": False,
    "use_qk_norm": True, "shared_expert_intermediate_size": 0,
}  # fmt: skip
MIMO_7B: Config = {
    **LLAMA, "model_type": "mimo", "num_hidden_layers": 36, "head_dim": 128, "intermediate_size": 11008,
    "vocab_size": 151680, "max_position_embeddings": 32768, "rope_theta": 640000, "attention_bias": True,
    "num_nextn_predict_layers": 1, "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
QWEN36_27B: Config = {
    "model_type": "qwen3_5", "language_model_only": False, "tie_word_embeddings": False,
    "text_config": {
        **QWEN35_27B, "vocab_size": 248320, "attn_output_gate": True, "output_gate_type": "swish",
    },
}  # fmt: skip
