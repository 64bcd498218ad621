"""What a schedule cannot run with yet: refused at start-up, with the reason.

Silence would be worse than a refusal: each of these would train on, wrongly or without the
schedule's effect.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megatron.core.transformer.enums import LayerType
from megatron.core.utils import get_te_version, is_te_min_version

from megatron_pp_ext.integration.hooks import engine_linear
from megatron_pp_ext.integration.request import layer_cut
from megatron_pp_ext.schedule.placement import Placement


class Refusal(NamedTuple):
    """A flag's spelling, when it is set, why it cannot be, and what to do instead."""

    flag: str
    is_set: Callable[[Namespace], object]
    reason: str
    fix: Callable[[Namespace], str] = lambda args: "leave one of the two out"


def is_set(name: str) -> Callable[[Namespace], object]:
    """Tells whether the argument ``name``, which not every Megatron has, is set to anything."""
    return lambda args: getattr(args, name, None)


def _predicts_apart(args: Namespace) -> bool:
    return any(LayerType.mtp in stage for stage in (layer_cut.layout(args) or [])[:-1])


def _captures_graphs(settings: Any) -> bool:
    return getattr(settings, "cuda_graph_impl", None) not in (None, "none")


def _changes_order(args: Namespace) -> bool:
    return args.pipeline_schedule == "auto" or args.pipeline_profile_steps is not None


def _gathers_weights(args: Namespace, kind: str = "") -> bool:
    shards = getattr(args, f"{kind}tensor_parallel_num_weight_shards", None) or 0
    ranks = (args.expert_tensor_parallel_size if kind else None) or args.tensor_model_parallel_size
    return bool(shards > ranks)


_GRAPHS = "graphs are captured in stock's order of microbatches"
_GATHERED = "a weight that is gathered for each use has no gradient to leave for later"

_ALWAYS = (
    Refusal("--use-megatron-fsdp", is_set("use_megatron_fsdp"), "FSDP reduces gradients by its own hooks"),
    Refusal("--use-torch-fsdp2", is_set("use_torch_fsdp2"), "FSDP reduces gradients by its own hooks"),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        is_set("overlap_moe_expert_parallel_comm"),
        "its combined 1F1B is a schedule of its own",
    ),
    Refusal(
        "--delay-wgrad-compute", is_set("delay_wgrad_compute"), "schedules split the backward themselves"
    ),
    Refusal("--cuda-graph-impl", _captures_graphs, _GRAPHS),
    # Two older names, which Megatron turns into the first.
    Refusal("--enable-cuda-graph", is_set("enable_cuda_graph"), _GRAPHS),
    Refusal("--external-cuda-graph", is_set("external_cuda_graph"), _GRAPHS),
    Refusal(
        "--hybrid-context-parallel",
        is_set("hybrid_context_parallel"),
        "its microbatches differ from rank to rank",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        is_set("fine_grained_activation_offloading"),
        "it moves activations in stock's order of microbatches",
    ),
    Refusal(
        "--moe-paged-stash",
        lambda args: getattr(args, "moe_paged_stash", None) and _changes_order(args),
        "it holds all steps to the order of its first one",
        lambda args: "choose a schedule that stays as it is, such as 1f1b",
    ),
    Refusal(
        "--defer-embedding-wgrad-compute",
        is_set("defer_embedding_wgrad_compute"),
        "schedules defer weight gradients themselves",
    ),
    Refusal(
        "--pipeline-model-parallel-layout",
        _predicts_apart,
        "multi-token prediction (m) in a stage before the last makes messages of two shapes",
        lambda args: "put the m beside the L",
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        is_set("overlap_param_gather_with_optimizer_step"),
        "it splits the optimizer by stock's order of chunks",
    ),
)

_SPLIT = (
    Refusal(
        "--transformer-impl transformer_engine",
        lambda args: (
            getattr(args, "transformer_impl", None) == "transformer_engine"
            and not is_te_min_version(engine_linear.FIRST_RELEASE)
        ),
        f"layers of Transformer Engine {get_te_version()} cannot leave their weight gradient for later",
        lambda args: (
            f"install transformer-engine {engine_linear.FIRST_RELEASE} or newer, or add "
            "--transformer-impl local"
        ),
    ),
    Refusal(
        "--tp-comm-overlap",
        is_set("tp_comm_overlap"),
        "the buffers that it gathers into are used again before a weight gradient runs",
    ),
    Refusal(
        "--use-transformer-engine-op-fuser",
        is_set("use_transformer_engine_op_fuser"),
        "a dense MLP's operations compute both gradients at once, and experts' are not made before a forward",
    ),
    Refusal(
        "--overlap-dispatch-backward-with-experts-wgrad",
        is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "schedules defer weight gradients themselves",
    ),
    Refusal("--tensor-parallel-num-weight-shards", _gathers_weights, _GATHERED),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards", partial(_gathers_weights, kind="expert_"), _GATHERED
    ),
)

_V = tuple(
    Refusal(
        flag,
        is_set(flag.removeprefix("--").replace("-", "_")),
        "a V has both ends of the model on one rank",
        lambda args: f"say where they go: --pipeline-model-parallel-layout '{layer_cut.as_v(args)}'",
    )
    for flag in layer_cut.ENDS
)


_CONFIG = {
    "mtp_standalone": "messages have one shape",
    "num_microbatches_with_partial_activation_checkpoints": "it counts microbatches in stock's order",
}
"""Settings without a flag, which a script can only make in the model's config."""


def refuse_unsupported_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    unsupported = {name: reason for name, reason in _CONFIG.items() if getattr(config, name, None)}
    if _captures_graphs(config):
        unsupported["cuda_graph_impl"] = _GRAPHS
    for name, reason in unsupported.items():
        raise ValueError(f"--pipeline-schedule does not support {name} in the model's config: {reason}")


def refuse_unsupported(args: Namespace, placement: Placement, splits_backward: bool) -> None:
    """Raise ValueError for the first flag in ``args`` that the schedule cannot run with."""
    refusals = _ALWAYS + (_SPLIT if splits_backward else ()) + (_V if placement.is_mirrored(1) else ())
    for refusal in refusals:
        if refusal.is_set(args):
            raise ValueError(
                f"--pipeline-schedule {args.pipeline_schedule} does not support {refusal.flag}: "
                f"{refusal.reason}; {refusal.fix(args)}"
            )
