"""A model's config in the words of Megatron's flags, where a trainer has no flags.

Rules and costs read flags.  Most settings have one name in both; ``arguments`` maps the others.
"""

from argparse import Namespace
from dataclasses import fields, is_dataclass
from typing import Any

from megatron_pp_ext.job import flag_table, layout_text

_RENAMED = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}

_NOT_ASKED = {
    # A config has a value for these that nobody asked for, and this package does not look at it.
    "overlap_p2p_comm",
    "microbatch_group_size_per_vp_stage",
}


def arguments(*configs: Any, **explicit: Any) -> Namespace:
    """Return the arguments that flags would have set for the settings of ``configs``.

    These are a TransformerConfig and what else has settings under the names of Megatron's arguments, such as
    the config of data parallelism.  ``explicit`` are arguments by name, and come first.
    """
    values: dict[str, Any] = {}
    names = vars(flag_table.parse([], {})[0])
    for config in configs:
        for field in fields(config) if is_dataclass(config) else ():
            name = _RENAMED.get(field.name, field.name)
            # What several of them have is asked for if one of them asks.
            if name in names and name not in _NOT_ASKED and not values.get(name):
                values[name] = getattr(config, field.name, None)
    if (layout := values.get("pipeline_model_parallel_layout")) is not None:
        values["pipeline_model_parallel_layout"] = layout_text.spelled_layout(layout)
    if values.get("num_query_groups") is not None:
        values["group_query_attention"] = values["num_query_groups"] != values.get("num_attention_heads")
    for config in configs:
        values.update(_activation(config))
    return flag_table.parse([], {**values, **explicit})[0]


def setting_of(argument: str) -> str:
    """Return the name in a model's config of the flag ``argument``."""
    return next((setting for setting, name in _RENAMED.items() if name == argument), argument)


def _activation(config: Any) -> dict[str, bool]:
    """Return the arguments of the activation function, which a config has as a function and two settings."""
    function = getattr(config, "activation_func", None)
    if function is None:
        return {}
    name, has_gate = getattr(function, "__name__", ""), bool(config.gated_linear_unit)
    is_quick, is_fused = name == "quick_gelu", config.bias_activation_fusion
    return {
        "squared_relu": name == "squared_relu",
        "quick_geglu": has_gate and is_quick,
        "swiglu": has_gate and not is_quick,
        "bias_swiglu_fusion": is_fused,
        "bias_gelu_fusion": is_fused,
    }
