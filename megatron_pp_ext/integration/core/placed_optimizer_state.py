"""State of a distributed optimizer that is saved rank by rank, as Megatron's default format does.

Such state follows a rank's buffers, and so the stages on it: it loads under the placement that it was saved
under and no other.  Under a placement that Megatron's own schedules do not have, its keys name the placement.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_pp_ext.integration.core import chunk_pipelines
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.schedule.placement import Placement

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
