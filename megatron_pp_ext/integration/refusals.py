"""What a schedule cannot run with yet: refused at start-up, with the reason.

Silence would be worse than a refusal: each of these would train on, wrongly or without the
schedule's effect.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_pp_ext.schedule.placement import Placement


class Refusal(NamedTuple):
    """A flag's spelling, when it is set, why it cannot be, and what to do instead."""

    flag: str
    is_set: Callable[[Namespace], object]
    reason: str
    fix: str = "leave one of the two out"


def _set(name: str) -> Callable[[Namespace], object]:
    return lambda args: getattr(args, name, None)


_ALWAYS = (
    Refusal("--use-megatron-fsdp", _set("use_megatron_fsdp"), "FSDP reduces gradients by its own hooks"),
    Refusal("--use-torch-fsdp2", _set("use_torch_fsdp2"), "FSDP reduces gradients by its own hooks"),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        _set("overlap_moe_expert_parallel_comm"),
        "its combined 1F1B is a schedule of its own",
    ),
    Refusal("--delay-wgrad-compute", _set("delay_wgrad_compute"), "schedules split the backward themselves"),
    Refusal(
        "--cuda-graph-impl",
        lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"),
        "graphs are captured in stock's order of microbatches",
    ),
    Refusal(
        "--hybrid-context-parallel",
        _set("hybrid_context_parallel"),
        "its microbatches differ from rank to rank",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        _set("fine_grained_activation_offloading"),
        "it moves activations in stock's order of microbatches",
    ),
    Refusal(
        "--defer-embedding-wgrad-compute",
        _set("defer_embedding_wgrad_compute"),
        "schedules defer weight gradients themselves",
    ),
    Refusal("--mtp-num-layers", _set("mtp_num_layers"), "multi-token prediction is not tried yet"),
    Refusal(
        "--overlap-grad-reduce",
        _set("overlap_grad_reduce"),
        "gradients are not yet reduced chunk by chunk as weight gradients finish",
    ),
)

_SPLIT = (
    Refusal(
        "--transformer-impl transformer_engine",
        lambda args: getattr(args, "transformer_impl", None) == "transformer_engine",
        "only Megatron's local linear layers can leave their weight gradient for later yet",
        "add --transformer-impl local",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: (args.tensor_parallel_num_weight_shards or 0) > args.tensor_model_parallel_size,
        "a weight that is gathered for each use has no gradient to leave for later",
    ),
)

_V = (
    Refusal(
        "--decoder-first-pipeline-num-layers",
        _set("decoder_first_pipeline_num_layers"),
        "a V has both ends on one rank",
        "describe uneven stages with --pipeline-model-parallel-layout",
    ),
    Refusal(
        "--decoder-last-pipeline-num-layers",
        _set("decoder_last_pipeline_num_layers"),
        "a V has both ends on one rank",
        "describe uneven stages with --pipeline-model-parallel-layout",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        _set("hybrid_layer_pattern"),
        "its | separators are not read for a V yet",
    ),
)


_CONFIG = {
    "variable_seq_lengths": "messages have one shape",
    "num_microbatches_with_partial_activation_checkpoints": "it counts microbatches in stock's order",
}
"""Settings without a flag, which a script can only make in the model's config."""


def refuse_unsupported_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    for name, reason in _CONFIG.items():
        if getattr(config, name, None):
            raise ValueError(f"--pipeline-schedule does not support {name} in the model's config: {reason}")


def refuse_unsupported(args: Namespace, placement: Placement, splits_backward: bool) -> None:
    """Raise ValueError for the first flag in ``args`` that the schedule cannot run with."""
    refusals = (
        _ALWAYS
        + (_SPLIT if splits_backward else ())
        + (_V if placement.is_mirrored(placement.chunks - 1) else ())
    )
    for refusal in refusals:
        if refusal.is_set(args):
            raise ValueError(
                f"--pipeline-schedule {args.pipeline_schedule} does not support {refusal.flag}: "
                f"{refusal.reason}; {refusal.fix}"
            )
