"""The types of models that are known, and how the keys of each become Megatron's arguments.

A type has the functions that read its keys, the arguments that all of its models have, and the values that
its configuration class in Transformers has for keys that a file leaves out.  ``refused_types.toml`` has those
that Megatron's flags do not describe.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron_pp_ext.planner.hugging_face import attention_keys as attention
from megatron_pp_ext.planner.hugging_face import expert_keys as mlp
from megatron_pp_ext.planner.hugging_face import family_keys as family
from megatron_pp_ext.planner.hugging_face import hybrid_keys as hybrid
from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import Keys, unknown_key

REFUSED_FILE = Path(__file__).with_name("refused_types.toml")


@dataclass(frozen=True, slots=True)
class ModelType:
    """``parts`` read the keys; ``fixed`` are the arguments that all models of the type have.

    ``defaults`` are the keys of those that a file may leave out.  ``notes`` are sentences on what the
    arguments leave out, since Megatron's flags have no words for it.
    """

    parts: tuple[Callable[[Keys], Arguments], ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, values: Mapping[str, Any]) -> tuple[Arguments, Keys]:
        """Return the arguments that ``values``, the content of a config.json, describe, and the keys read.

        ValueError for a value that is wrong and for a key that nothing knows.
        """
        keys = Keys(values, self.defaults)
        keys.notes += self.notes
        found: Arguments = {}
        for part in self.parts:
            found |= part(keys)
        found |= self.fixed
        for name, value in keys.unused().items():
            raise ValueError(unknown_key(name, value))
        return found, keys


_CORE = (family.body, family.rms_norm, attention.heads, attention.rotary)
_WINDOWED = (*_CORE, attention.windows)
_LATENT = (
    family.body,
    family.rms_norm,
    attention.latent,
    mlp.gated,
    mlp.experts,
    mlp.expert_layers,
    mlp.shared,
)
_DEEPSEEK_V3 = (*_LATENT, mlp.sigmoid_router, mlp.prediction)
_SPARSE = (*_DEEPSEEK_V3, attention.sparse)
_SOFTMAX_EXPERTS = (mlp.experts, mlp.expert_layers, mlp.softmax_router)
_MIXTRAL = (mlp.experts_as_wide_as_mlps, mlp.expert_layers, mlp.softmax_router)
_NORMALISED = {"norm_topk_prob": True}
_QUERY_NORM = {"qk_layernorm": True}
_OF_QWEN = {"use_sliding_window": False}
_GEMMA = (*_CORE, family.no_biases, mlp.gated_by_gelu)
_OF_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_ZERO_CENTRED = {"layernorm_zero_centered_gamma": True}
_POST_NORMS = "the norms behind attention and MLPs are left out, for which Megatron has no flag"
_DELTA_NETS = (*_CORE, family.no_biases, attention.gated_delta_net, mlp.prediction)
_OF_DELTA_NETS = {**_QUERY_NORM, **_ZERO_CENTRED}
_GLM4_MOE = (
    *_CORE,
    attention.biases_of_inputs,
    family.optional_query_norm,
    mlp.gated,
    mlp.experts,
    mlp.expert_layers,
    mlp.shared,
    mlp.sigmoid_router,
    mlp.prediction,
)

TYPES: Mapping[str, ModelType] = {
    "gpt2": ModelType((family.gpt2,)),
    "llama": ModelType((*_CORE, attention.biases_of_all, mlp.gated)),
    "mistral": ModelType((*_WINDOWED, family.no_biases, mlp.gated)),
    "ministral": ModelType((*_WINDOWED, family.no_biases, mlp.gated)),
    "ministral3": ModelType((*_WINDOWED, family.no_biases, mlp.gated)),
    "mixtral": ModelType((*_WINDOWED, family.no_biases, mlp.gated, *_MIXTRAL), defaults=_NORMALISED),
    "phi3": ModelType((*_WINDOWED, family.no_biases, mlp.gated, family.dropped)),
    "ernie4_5": ModelType((*_CORE, family.no_biases, mlp.gated), defaults={"tie_word_embeddings": True}),
    "smollm3": ModelType(
        (*_WINDOWED, attention.biases_of_all, mlp.gated, attention.positions_left_out),
        defaults={**_OF_QWEN, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    ),
    "qwen2": ModelType((*_WINDOWED, family.query_biases, mlp.gated), defaults=_OF_QWEN),
    "qwen2_moe": ModelType(
        (*_WINDOWED, family.query_biases, mlp.gated, *_SOFTMAX_EXPERTS, mlp.gated_shared), defaults=_OF_QWEN
    ),
    "mimo": ModelType((*_WINDOWED, attention.biases_of_inputs, mlp.gated, mlp.prediction), defaults=_OF_QWEN),
    "qwen3": ModelType((*_WINDOWED, attention.biases_of_all, mlp.gated), _QUERY_NORM, _OF_QWEN),
    "qwen3_moe": ModelType(
        (*_WINDOWED, attention.biases_of_all, mlp.gated, *_SOFTMAX_EXPERTS), _QUERY_NORM, _OF_QWEN
    ),
    "qwen3_next": ModelType(
        (*_DELTA_NETS, mlp.gated, *_SOFTMAX_EXPERTS, mlp.gated_shared), _OF_DELTA_NETS, _NORMALISED
    ),
    "qwen3_5_text": ModelType((*_DELTA_NETS, mlp.gated), _OF_DELTA_NETS),
    "qwen3_5_moe_text": ModelType(
        (*_DELTA_NETS, mlp.gated_experts_alone, *_SOFTMAX_EXPERTS, mlp.gated_shared),
        _OF_DELTA_NETS,
        _NORMALISED,
    ),
    "olmoe": ModelType((*_CORE, family.no_biases, mlp.gated, *_MIXTRAL, family.norm_of_all_heads)),
    "dots1": ModelType(
        (
            *_WINDOWED,
            family.no_biases,
            mlp.gated,
            mlp.experts,
            mlp.expert_layers,
            mlp.shared,
            mlp.sigmoid_router,
        ),
        _QUERY_NORM,
    ),
    "glm4_moe": ModelType(_GLM4_MOE),
    "deepseek_v2": ModelType((*_LATENT, mlp.grouped_router)),
    "deepseek_v3": ModelType(_DEEPSEEK_V3),
    "kimi_k2": ModelType(_DEEPSEEK_V3),
    "glm4_moe_lite": ModelType(_DEEPSEEK_V3),
    "deepseek_v32": ModelType(_SPARSE),
    "glm_moe_dsa": ModelType(_SPARSE),
    "gpt_oss": ModelType(
        (*_WINDOWED, family.gpt_oss, *_MIXTRAL),
        {
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": 1,  # Megatron shards no experts that have biases
        },
        {"sliding_window_pattern": 2, "head_dim": 64, **_NORMALISED},
    ),
    "minimax_m2": ModelType(
        (
            *_CORE,
            family.no_biases,
            mlp.gated,
            mlp.experts_as_wide_as_mlps,
            mlp.expert_layers,
            mlp.sigmoid_router,
            family.norm_of_all_heads,
            family.unpublished_prediction,
        ),
    ),
    "gemma": ModelType(_GEMMA, _ZERO_CENTRED, _OF_GEMMA),
    "gemma2": ModelType(
        (*_GEMMA, attention.windows, family.soft_caps),
        _ZERO_CENTRED,
        {**_OF_GEMMA, "sliding_window_pattern": 2},
        (_POST_NORMS,),
    ),
    "gemma3_text": ModelType(
        (*_GEMMA, attention.windows, family.soft_caps),
        {**_ZERO_CENTRED, **_QUERY_NORM},
        {
            **_OF_GEMMA,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
        },
        (_POST_NORMS,),
    ),
    "nemotron": ModelType(
        (
            family.body,
            family.layer_norm_1p,
            attention.heads,
            attention.rotary,
            family.no_biases,
            mlp.squared_relu,
        ),
        defaults={"partial_rotary_factor": 0.5},
    ),
    "nemotron_h": ModelType(
        (family.hybrid_body, attention.heads, hybrid.hybrid_layers, hybrid.hybrid_experts, mlp.squared_relu)
    ),
    "llama4_text": ModelType(
        (
            *_CORE,
            family.no_biases,
            family.chunked,
            attention.positions_left_out,
            family.llama4_experts,
            mlp.expert_layers,
        ),
        {"rotary_interleaved": True},
        {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "rope_theta": 500000.0},
    ),
}
"""By model_type: each with the paper or the configuration class that its functions name."""

SAME = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_moe_text": "glm4_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
}
"""Types whose language model is that of another type."""


@cache
def refused() -> dict[str, str]:
    """Return by model_type why Megatron's flags describe no such model."""
    reasons: dict[str, str] = tomllib.loads(REFUSED_FILE.read_text(encoding="utf-8"))
    return {name: reason for reason, names in reasons.items() for name in names.split()}
