"""Trainers without flags: a model's config in the words of flags, and errors in the words of a call.

Rules and costs read flags.  Most settings have one name in both; ``arguments`` maps the others.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from megatron_pp_ext.job import flag_table, layers, options
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.setting_error import NamesSettings

_RENAMED = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "cuda_graph_scope": "cuda_graph_modules",
}

_SHARDS = {
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}
"""The parts of a weight, and the ranks that have them.  Where nothing is gathered for each use, a config that
Megatron makes of arguments has as many parts as ranks, and any other config has None."""

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
                value = getattr(config, field.name, None)
                values[name] = _modules(value) if name == "cuda_graph_modules" else _dtype(value)
    if values.get("cuda_graph_impl") == "local" and "full_iteration" in values.get("cuda_graph_modules", ()):
        # So it was called before 0.18, and Megatron replaces it.
        values.update(cuda_graph_impl="full_iteration", cuda_graph_modules=[])
    for shards, ranks in _SHARDS.items():
        if values.get(shards) == values.get(ranks):
            values.pop(shards, None)
    if (layout := values.get("pipeline_model_parallel_layout")) is not None:
        values["pipeline_model_parallel_layout"] = layers.spelled_layout(layout)
    if values.get("num_query_groups") is not None:
        values["group_query_attention"] = values["num_query_groups"] != values.get("num_attention_heads")
    for config in configs:
        values.update(_activation(config))
    return flag_table.parse([], {**values, **explicit})[0]


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


def _modules(value: Any) -> list[str]:
    """Return the modules that graphs capture; none for all of a layer, which has a word of its own."""
    modules = [value] if isinstance(value, str) else value or ()
    return [name for module in modules if (name := str(getattr(module, "name", module))) != "full"]


def _dtype(value: Any) -> Any:
    """Return ``value``, a torch.dtype by the word that flags have for it."""
    return _DTYPES.get(str(value), value)


_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


def of_container(container: Any, data: int) -> Namespace:
    """Return the arguments of a job that Megatron-Bridge's ``container``, a ConfigContainer, describes.

    It is completed as Bridge does at a start (``runtime_config_update``) for ``data`` data-parallel ranks:
    its precision and its overlaps are settings of their own, which change those of the model, the optimizer
    and data parallelism.  ``AttributeError`` for an object of another kind.
    """
    model, optimizer, parallel = container.model, container.optimizer, container.ddp
    precision, overlap = container.mixed_precision, container.comm_overlap
    if isinstance(precision, str):
        # A name, for which the container's own module has the settings.
        precision = vars(sys.modules[type(container).__module__])["get_mixed_precision_config"](precision)
    if precision is not None:
        precision.finalize()
        precision.setup(model, optimizer, parallel)
    if overlap is not None:
        overlap.data_parallel_size = data
        overlap.finalize()
        overlap.setup(model, optimizer, parallel)
    # A builder's config has the transformer's as a part; a provider is one.
    transformer = getattr(model, "transformer", model)
    is_bf16, reduces_fp32 = transformer.bf16, parallel.grad_reduce_in_fp32
    result = arguments(
        transformer,
        model,
        parallel,
        optimizer,
        seq_length=model.seq_length,
        max_position_embeddings=getattr(model, "max_position_embeddings", None) or model.seq_length,
        vocab_size=model.vocab_size or getattr(container.tokenizer, "vocab_size", None),
        pad_vocab_size=getattr(model, "should_pad_vocab", True),
        make_vocab_size_divisible_by=getattr(model, "make_vocab_size_divisible_by", None) or 128,
        position_embedding_type=model.position_embedding_type,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        hybrid_layer_pattern=getattr(model, "hybrid_layer_pattern", None)
        or getattr(model, "hybrid_override_pattern", None),
        grad_reduce_in_bf16=is_bf16 and not reduces_fp32,
        accumulate_allreduce_grads_in_fp32=reduces_fp32,
        fp8_param_gather=bool(getattr(transformer, "fp8_param", False)),
        fp4_param_gather=bool(getattr(transformer, "fp4_param", False)),
        micro_batch_size=container.train.micro_batch_size,
        global_batch_size=container.train.global_batch_size,
    )
    # These have values in a config whether they have an effect or not.
    if not result.defer_embedding_wgrad_compute:
        result.wgrad_deferral_limit = None
    if result.pipeline_model_parallel_layout is not None:
        result.num_virtual_stages_per_pipeline_rank = None
    if not result.use_megatron_fsdp:
        result.data_parallel_sharding_strategy = None
    return result


_ARGUMENTS = "ranks", "microbatches", "chunks", "memory-limit", "costs", "trace", "timeout", "loss-rank"
_SWITCH = "unproved"
"""The argument whose flag has no value."""

_variables: dict[str, str] = {}
"""The environment's variable of each argument, where the environment made the call."""


def use_variables(variables: Mapping[str, str]) -> None:
    """Let errors name the environment's ``variables``, by argument, from now on; with none the arguments."""
    _variables.clear()
    _variables.update(variables)


@contextmanager
def in_words_of_call() -> Iterator[None]:
    """Let errors about settings that leave the context name what a call can change."""
    try:
        yield
    except NamesSettings as error:
        error.args = tuple(by_call(part) if isinstance(part, str) else part for part in error.args)
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            error.code = by_call(error.code)  # which is what Python prints
        raise


def by_call(text: str) -> str:
    """Return the ``text`` of a ``NamesSettings`` with arguments of a call, and settings of a config."""
    text = text.replace("--pipeline-schedule ", "")
    return _FLAG.sub(_setting, _arguments().sub(_argument, text))


@cache
def _arguments() -> re.Pattern[str]:
    """Return the pattern of arguments' flags, with a value after "=" or a word that some flag takes."""
    names = "|".join((*_ARGUMENTS, _SWITCH, *(name.replace("_", "-") for name in options.arguments())))
    flags = map(flag_table.parser()._option_string_actions.get, flag_table.flags())
    words = sorted({str(word) for flag in flags if flag is not None for word in flag.choices or ()} | {AUTO})
    return re.compile(rf"--pipeline-({names})(?![\w-])(?:=([^\s,;]+)| ({'|'.join(words)})\b)?")


def _argument(flag: re.Match[str]) -> str:
    name, value, word = flag[1].replace("-", "_"), flag[2], flag[3]
    if name == _SWITCH:
        value = "True"
    variable = _variables.get(name)
    if value is None and word is None:
        return variable or name
    if variable is not None:
        return f"{variable}={'1' if value == 'True' else value or word}"
    return f"{name}={value}" if word is None else f'{name}="{word}"'


_FLAG = re.compile(r"--[a-zA-Z0-9][a-zA-Z0-9-]*")


def _setting(flag: re.Match[str]) -> str:
    """Return the config's name of what one of Megatron's flags sets; flags of this package stay."""
    action = flag_table.parser()._option_string_actions.get(flag[0])
    if action is None or flag[0] in flag_table.flags():
        return flag[0]
    name = next((setting for setting, name in _RENAMED.items() if name == action.dest), action.dest)
    return f"{name}=False" if action.const is False else name
