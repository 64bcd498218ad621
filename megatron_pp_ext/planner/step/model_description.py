"""A model and how to train it, in the names that Megatron gives its flags.

The planner takes a Namespace with at least the names of ``DEFAULTS``; Megatron's own is one.  Without
Megatron at hand it is made from a JSON object: ``{"num_layers": 96, "hidden_size": 12288,
"num_attention_heads": 96, "seq_length": 2048, "vocab_size": 51200, "bf16": true}``.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_pp_ext.job.updates import DelayCorrection
from megatron_pp_ext.json_input import did_you_mean, is_number
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO, SHARED

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

SIZES: dict[str, int | None] = {
    **dict.fromkeys(_NEEDED),
    # The model.
    "vocab_size": None,
    "padded_vocab_size": None,
    "make_vocab_size_divisible_by": 128,
    "ffn_hidden_size": None,
    "kv_channels": None,
    "num_query_groups": 1,
    "max_position_embeddings": None,
    "rotary_base": 10000,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "mtp_num_layers": None,
    # How it is trained.
    "micro_batch_size": None,
    "global_batch_size": None,
    "recompute_num_layers": None,
    # On how many ranks.
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
}
"""The names whose values are whole numbers of 1 or more, or None, with their defaults."""

_TEXTS = (
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "pipeline_replicas",
    "pipeline_schedule",
    "pipeline_vocabulary",
    "tokenizer_type",
)
"""The names whose values are texts, or None, the default."""

DEFAULTS: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(_TEXTS),
    # The model.
    "group_query_attention": False,
    "swiglu": False,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "position_embedding_type": "learned_absolute",
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "untie_embeddings_and_output_weights": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    # How it is trained.
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp8_param_gather": False,
    "optimizer": "adam",
    "sgd_momentum": 0.9,
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "main_params_dtype": "fp32",
    "use_distributed_optimizer": False,
    "grad_reduce_in_bf16": False,
    "accumulate_allreduce_grads_in_fp32": False,
    "overlap_grad_reduce": False,
    "overlap_moe_expert_parallel_comm": False,
    "overlap_param_gather": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "distribute_saved_activations": False,
    # In which stages.
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "decrease_batch_size_if_needed": False,
    "pipeline_memory_limit": None,
    "pipeline_costs": None,
    "pipeline_profile_steps": None,
    "pipeline_update_interval": None,
    "pipeline_vertical_sync": False,
    "pipeline_allow_waits": False,
    "pipeline_delay_correction": None,
}

_CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "recompute_granularity": (None, "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
    "pipeline_vocabulary": (None, SHARED, AUTO),
    "pipeline_delay_correction": (None, *DelayCorrection),
}
"""The values of names that accept few; any other value would otherwise count as the default."""


def require_known(values: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, naming ``where``, for a name that is none of ``DEFAULTS``."""
    for name in values:
        if name not in DEFAULTS:
            hint = did_you_mean(name, DEFAULTS, "leave it out", cutoff=0.6)
            raise ValueError(f"{where}: {name!r} is unknown: {hint}")


def describe(values: Mapping[str, Any], where: str = "the model") -> Namespace:
    """Return ``values`` with the defaults for all others; ValueError, naming ``where``, for unknown names."""
    require_known(values, where)
    args = Namespace(**{**DEFAULTS, **values})
    settle(args)
    require_complete(args, where)
    return args


def settle(args: Namespace) -> None:
    """Set what Megatron derives from other arguments, and the name here of the schedule."""
    if isinstance(args.pipeline_schedule, str):
        args.pipeline_schedule = catalog.canonical(args.pipeline_schedule)
    if getattr(args, "recompute_activations", False) and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False


def require_complete(args: Namespace, where: str) -> None:
    """Raise ValueError for a size that is missing and for a value that Megatron does not accept."""
    for name in _NEEDED:
        if getattr(args, name) is None and (name != "num_layers" or not args.hybrid_layer_pattern):
            raise ValueError(f"{where} has no {flag(name)}: give it")
    for name, default in DEFAULTS.items():
        value = getattr(args, name, default)
        if name in SIZES and value is not None and not _is_size(value):
            rule = "a whole number of 1 or more"
        elif name in _TEXTS and value is not None and not isinstance(value, str):
            rule = "a text"
        elif name in _CHOICES and value not in _CHOICES[name]:
            rule = f"one of {', '.join(choice for choice in _CHOICES[name] if choice)}"
        elif isinstance(default, bool) and not isinstance(value, bool):
            rule = "true or false"
        elif isinstance(default, float) and not is_number(value):
            rule = "a finite number"
        elif name == "pipeline_memory_limit" and value is not None and not _is_limit(value):
            rule = "a number above 0, or a text with one for each rank, as in 0.9-0.8"
        elif name == "moe_layer_freq" and args.num_experts and not _is_frequency(value, args.num_layers):
            rule = "a whole number of 1 or more, or a list of 0 and 1, one a layer"
        else:
            continue
        raise ValueError(f"{where} has {flag(name)} {value!r}, but it must be {rule}: correct it")
    if not args.kv_channels and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads "
            f"{args.num_attention_heads}: change one, or give --kv-channels"
        )
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16 contradict each other: leave one out")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_limit(value: object) -> bool:
    return isinstance(value, str) or (is_number(value) and value > 0)


def _is_frequency(value: object, layers: int | None) -> bool:
    if isinstance(value, list):
        return len(value) == layers and all(one in (0, 1) for one in value)
    return _is_size(value)


def flag(name: str) -> str:
    """Return ``name`` as a flag."""
    return "--" + name.replace("_", "-")
