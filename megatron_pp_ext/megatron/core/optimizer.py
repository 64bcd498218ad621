"""Updates: checks after a step's actions, norms of one stage alone, and optimizer state saved by rank."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.runtime.rank import print_rank_0
from megatron_pp_ext.schedule.placement import Placement

_late: list[Callable[[], None]] | None = None
"""The checks that wait for the end of the running step; None outside of one."""


@contextmanager
def put_off() -> Iterator[None]:
    """Make the checks that are asked for inside at the end of the context, in their order.

    A check asks whether a number on the device is finite.  Stock asks at every microbatch of the loss stage
    and before every bucket's reduction, and the host launches nothing until the device has come so far.
    Under a V the loss stage shares its rank with another one, whose actions would wait too.
    """
    global _late
    late: list[Callable[[], None]] = []
    _late = late
    try:
        yield
    finally:
        _late = None
    for check in late:
        check()


@hook(
    "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
    "self result rejection_func message comparison_func tolerance fatal",
    "checks of losses and gradients for which the host does not wait between two actions",
)
def check_late(
    stock: Callable[..., None],
    machine: Any,
    result: Any,
    rejection_func: Callable[[Any], Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Put checks off within ``put_off``; in a rehearsal, whose numbers are dummies, all succeed."""
    if _late is None:
        stock(machine, result, rejection_func, *args, **kwargs)
        return
    if isinstance(result, torch.Tensor):
        # Megatron divides a loss in place afterwards, and may free it.
        result = result.detach().clone()
    if requested.require().rehearsal is not None:
        rejection_func = functools.partial(_accept, rejection_func)
    _late.append(functools.partial(stock, machine, result, rejection_func, *args, **kwargs))


def _accept(rejection_func: Callable[[Any], Any], result: Any) -> Any:
    """Return a verdict for which the host waits as for any other, and which accepts."""
    return rejection_func(result) & False


def updates_by_stage() -> bool:
    """Return whether stages update their weights without waiting for each other.

    Stock takes the gradient norm, for clipping and for the log, over all pipeline ranks, and has them agree
    that the update was done.  Under a schedule that never flushes, each stage takes its own.
    """
    pipeline = requested.pipeline()
    return pipeline is not None and pipeline.updates is not None and not pipeline.updates.waits


_OPTIMIZER = (
    "config model_chunks config_overrides use_gloo_process_groups pg_collection dump_param_to_param_group_map"
)


@hook("megatron.core.optimizer:get_megatron_optimizer", _OPTIMIZER, "settings that a schedule turns off")
def without_needless(
    stock: Callable[..., Any], config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Make the optimizer of chunks that a call built, without the settings that their schedule turns off.

    For one chunk a rank Megatron itself fails to make the optimizer of the remaining chunks.
    """
    pipeline = chunk_pipelines.of_model(model_chunks)
    if pipeline is not None and pipeline.is_per_model:
        turn_off(pipeline, config)
    return stock(config, model_chunks, *args, **kwargs)


def turn_off(pipeline: requested.Pipeline, *configs: Any) -> None:
    """Turn off in ``configs``, of a model or an optimizer, what ``pipeline`` does without; report each."""
    from megatron_pp_ext.job.model_config import arguments, by_call
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules import all_rules

    schedule = {"pipeline_schedule": pipeline.request.schedule}
    job = RequestedJob.of_args(arguments(*configs, **schedule), placement=pipeline.placement)
    for name, line in all_rules.turned_off(job).items():
        for config in configs:
            if hasattr(config, name):
                setattr(config, name, False)
        print_rank_0(f"megatron_pp_ext: {by_call(line)}")


_CLIP = "megatron.core.optimizer.clip_grads"
_ZEROS = "parameters grad_stats_parallel_group use_decoupled_grad tp_group"


@hook(
    f"{_CLIP}:get_grad_norm_fp32",
    "grads_for_norm norm_type grad_stats_parallel_group",
    "gradient norms of a pipeline that never flushes",
)
@hook(
    f"{_CLIP}:count_zeros_fp32",
    (_ZEROS, f"{_ZEROS} expert_tp_group"),
    "counts of zeros in a pipeline that never flushes",
)
def sum_within_stage(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sum a statistic of the gradients over this stage's ranks alone, also where stock names no group.

    The distributed optimizer of Muon and its like (``LayerWiseDistributedOptimizer``) sums over all ranks.
    """
    if not updates_by_stage():
        return stock(*args, **kwargs)
    call = bound(stock, *args, **kwargs)
    group = call.arguments.get("grad_stats_parallel_group")
    call.arguments["grad_stats_parallel_group"] = _part_of_stage(group)
    return stock(*call.args, **call.kwargs)


def _part_of_stage(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group of the ranks of ``group``, None for all, that are in this rank's pipeline stage."""
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    ranks = _ranks(group) & _ranks(stage)
    for candidate in (
        stage,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_tensor_and_context_parallel_group(),
    ):
        if _ranks(candidate) == ranks:
            return candidate
    raise RuntimeError(
        f"Megatron has no process group of the ranks {sorted(ranks)}, over which this stage would take its "
        "gradient norm; add --pipeline-allow-waits, which takes it over all stages"
    )


def _ranks(group: dist.ProcessGroup | None) -> set[int]:
    return set(dist.get_process_group_ranks(group))


_FORMAT, _PLACEMENT = "param_state_sharding_type", "megatron_pp_ext_placement"
"""The part of a state dict about an optimizer's format, and its placement unless that is stock's."""

_WHY = "a distributed optimizer's state goes only where it was saved, models that were built by a call"


def describe(placement: Placement) -> str:
    """Return a placement in words that a checkpoint can keep and a person can read."""
    shared = " and a shared vocabulary" if placement.splits_head else ""
    chunks = f"{placement.chunks} chunk(s) on each of {placement.ranks} ranks"
    ends = " and both ends of the model on the last one" if placement.ends_on_last else ""
    return f"{placement.shape} placement with {chunks}{ends}{shared}"


@hook(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
    "self model_sharded_state_dict is_loading sharding_type metadata",
    _WHY,
)
def name_placement(
    stock: Callable[..., dict[str, Any]], optimizer: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Name the placement in state that goes by rank; a run of flags has it among its arguments.

    The keys name it, too: sizes may agree where contents do not (a wave and a loop of three chunks, say), and
    a process without this package would load one layer's state into another.

    A distributed optimizer's state follows a rank's buffers, and so the stages on it: it loads under the
    placement that it was saved under and no other.
    """
    state = stock(optimizer, *args, **kwargs)
    pipeline = chunk_pipelines.of_model(optimizer.model_chunks)
    is_ours = pipeline is not None and pipeline.is_per_model and pipeline.moves_stages
    if pipeline is not None and is_ours and _goes_by_rank(state):
        state[_PLACEMENT] = describe(pipeline.placement)
        add_prefix_for_sharding(state, f"{state[_PLACEMENT]}.")
    return state


_WHENCE = "sharded_state_dict checkpoint_dir sharded_strategy"
_LOAD = "validate_access_integrity strict"


@hook(
    "megatron.core.dist_checkpointing.serialization:load",
    (
        f"{_WHENCE} common_strategy {_LOAD}",
        f"{_WHENCE} common_strategy {_LOAD} verify_integrity",
        f"{_WHENCE} {_LOAD} verify_integrity process_group",
    ),
    _WHY,
)
def load_where_saved(
    stock: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: str | Path, *args: Any, **kwargs: Any
) -> Any:
    """Load a checkpoint; ValueError, in one line, where its optimizer's state is for another placement."""
    placements = dict(_by_rank(sharded_state_dict))
    saved = dict(_by_rank(load_common_state_dict(checkpoint_dir))) if placements else {}
    for place in placements.keys() & saved.keys():
        before, now = (source[place] or "Megatron's own placement" for source in (saved, placements))
        if before != now:
            raise ValueError(
                f"the checkpoint in {checkpoint_dir} keeps the optimizer's state rank by rank, for {before}, "
                f"and this model has {now}; save with dist_ckpt_optim_fully_reshardable there, or load "
                "without the optimizer's state"
            )
    return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def _goes_by_rank(state: dict[Any, Any]) -> bool:
    formats = DistributedOptimizer.checkpoint_fully_reshardable_formats
    return _FORMAT in state and state[_FORMAT] not in formats


def _by_rank(state: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str | None]]:
    """Yield the place in ``state`` and the placement of each optimizer whose state goes by rank."""
    if not isinstance(state, dict):
        return
    if _goes_by_rank(state):
        yield place, state.get(_PLACEMENT)
        return
    for key, value in state.items():
        yield from _by_rank(value, (*place, key))
