"""Checkpoints that are loaded under another placement than the one that saved them.

Megatron's torch_dist checkpoints name weights by their place in the model, so that they load under any
placement.  Two things still depend on the rank: the state of a distributed optimizer that was not saved fully
reshardable, and any optimizer's state of experts.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.checkpointing import CheckpointType

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.embedding_copies import separate_copies
from megatron_pp_ext.megatron.core.optimizer import describe
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.schedule.placement import Placement, Shape

_PARAMETERS = "load_dir args rank0 sharded_state_dict checkpointing_context"


@hook(
    "megatron.training.checkpointing:_load_base_checkpoint",
    (_PARAMETERS, f"{_PARAMETERS} dp_cp_group expt_dp_group gpt_compat_layer_maps"),
    "state for the stages of this rank, a copy of it for each tied weight",
)
def load_placed(stock: Callable[..., Any], load_dir: str, args: Namespace, *more: Any, **kwargs: Any) -> Any:
    """Refuse state that goes by rank and was saved elsewhere; give each copy of a tensor its own memory.

    Sizes may agree where contents do not (a wave and a loop of three chunks, say); stock would then
    train on with one layer's optimizer state in another.  A refusal ends the process with one line.

    Megatron calls this for what all ranks have in common before it does so for tensors.
    """
    loaded = stock(load_dir, args, *more, **kwargs)
    state, _, is_release, kind = loaded
    # Before validation only the flags of a checkpoint are read.
    if state and "args" in state and hasattr(args, "pipeline_placement"):
        _refuse_other_placement(load_dir, state, kind, args)
        if not is_release:  # which has weights alone
            _refuse_other_experts(load_dir, state, kind, args)
    if state and requested.pipeline() is not None:
        separate_copies(state)
    return loaded


def _refuse_other_placement(load_dir: str, state: dict[str, Any], kind: Any, args: Namespace) -> None:
    saved = state["args"]
    before, now = _placement(saved), _placement(args)
    by_us = getattr(saved, "pipeline_placement", None) or args.pipeline_placement
    fix = _fix_if_rank_by_rank(state, kind, args)
    if by_us and before != now and fix:
        raise SystemExit(
            f"megatron_pp_ext: the checkpoint in {load_dir} keeps state rank by rank, for {before}, "
            f"but this run has {now}; {fix}"
        )


def _refuse_other_experts(load_dir: str, state: dict[str, Any], kind: Any, args: Namespace) -> None:
    """Refuse a checkpoint whose experts are on another number of ranks, where Megatron cannot deal them anew.

    As soon as several ranks share the experts, Megatron gives them an optimizer of their own, and the state
    of one optimizer does not become that of two.
    """
    before, now = (getattr(source, "expert_model_parallel_size", 1) or 1 for source in (state["args"], args))
    if before == now:
        return
    if kind == CheckpointType.LEGACY:
        fix = "save with --ckpt-format torch_dist there"
    elif not _loads_optimizer(state, args):
        return
    elif 1 in (before, now):
        fix = "load with --no-load-optim, which starts a new optimizer"
    elif args.use_distributed_optimizer and not _is_reshardable(state):
        fix = "save with --dist-ckpt-optim-fully-reshardable there, or load with --no-load-optim"
    else:
        return
    raise SystemExit(
        f"megatron_pp_ext: the checkpoint in {load_dir} keeps the state of experts that were on {before} "
        f"rank(s), but this run has --expert-model-parallel-size {now}; go on with {before}, or {fix}"
    )


def _placement(args: Namespace) -> str:
    """Return the placement of a run with these validated flags, which are ours or else stock's."""
    placement = getattr(args, "pipeline_placement", None)
    if placement is not None:
        return str(placement)
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    ranks = getattr(args, "pipeline_model_parallel_size", 1)
    return describe(Placement(Shape.LOOP if chunks > 1 else Shape.LINEAR, ranks, chunks))


def _fix_if_rank_by_rank(state: dict[str, Any], kind: Any, args: Namespace) -> str | None:
    """Return a fix, if this run would load something that depends on the placement of stages."""
    if kind == CheckpointType.LEGACY:
        return "go on with the old placement, or save with --ckpt-format torch_dist there"
    if not args.use_distributed_optimizer or not _loads_optimizer(state, args) or _is_reshardable(state):
        return None
    return "save with --dist-ckpt-optim-fully-reshardable, or load with --no-load-optim"


def _loads_optimizer(state: dict[str, Any], args: Namespace) -> bool:
    """Whether this run takes the optimizer's state out of the checkpoint, which may have none."""
    return not (args.no_load_optim or args.finetune or getattr(state["args"], "no_save_optim", False))


def _is_reshardable(state: dict[str, Any]) -> bool:
    """Whether the checkpoint has a distributed optimizer's state by weight, if it has any."""
    sharding = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    return sharding is None or sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats
