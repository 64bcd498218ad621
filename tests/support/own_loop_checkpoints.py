"""Checkpoints that an own loop saves under one schedule and loads under another."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import megatron_pp_ext
from tests.support import own_loop

BY_RANK, BY_WEIGHT = "dp_reshardable", "fully_reshardable"

SHARED_KEYS = "keys of state that goes by rank which a V shares with stock"

SCHEDULES = {
    "stock": 1,
    "stock interleaved": 2,
    "v-half": 2,
    "v-min": 2,
    "v-half on the first rank": 2,
    "interleaved": 2,
}
"""Schedules, of which two have the same placement, and their chunks a rank."""

FIRST = " on the first rank"
"""The end of the name of a V with both ends there."""

PAIRS = [
    (BY_RANK, "v-half", "v-min"),
    (BY_RANK, "v-half", "stock"),
    (BY_RANK, "v-half", "interleaved"),
    (BY_RANK, "stock", "v-half"),
    (BY_RANK, "v-half", "v-half on the first rank"),
    (BY_RANK, "v-half on the first rank", "v-half on the first rank"),
    (BY_RANK, "stock interleaved", "interleaved"),
    (BY_WEIGHT, "v-half", "stock"),
    (BY_WEIGHT, "stock", "v-half"),
    (BY_WEIGHT, "v-half on the first rank", "v-half"),
]
"""The format, who saves and who loads."""


def exchanged(folder: str) -> dict[Any, Any]:
    """Return for each of ``PAIRS`` the line that refuses the load, or whether it brought the same moments.

    With it come the ``SHARED_KEYS``.
    """
    saved: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    results: dict[Any, Any] = {}
    keys: dict[tuple[str, str], set[str]] = {}
    for form, name, other in PAIRS:
        path = Path(folder, f"{form} {name}")
        if (form, name) not in saved:
            path.mkdir(exist_ok=True)
            model, optimizer = _built(name)
            _update(model, optimizer, 1)
            state = _state(model, optimizer, form, is_loading=False)
            keys[form, name] = {shard.key for shard in _shards(state["optimizer"])}
            dist_checkpointing.save(state, str(path))
            saved[form, name] = _moments(model, optimizer)
        model, optimizer = _built(other)
        _update(model, optimizer, -1)
        template = _state(model, optimizer, form, is_loading=True)
        try:
            loaded = dist_checkpointing.load(template, str(path))
        except ValueError as error:
            results[form, name, other] = str(error)
            continue
        if form == BY_WEIGHT:  # which torch's own Adam cannot take: its steps are counted by weight
            results[form, name, other] = "loaded"
            continue
        with torch.no_grad():
            optimizer.load_state_dict(loaded["optimizer"])
        now, before = _moments(model, optimizer), saved[form, name]
        common = now.keys() & before.keys()
        is_same = all(torch.equal(now[key], before[key]) for key in common)
        results[form, name, other] = "same" if common and is_same else "other"
    results[SHARED_KEYS] = keys[BY_RANK, "v-half"] & keys[BY_RANK, "stock"]
    return results


def _shards(state: Any) -> Iterator[ShardedBase]:
    return (value for value in nested_values(state) if isinstance(value, ShardedBase))


def _built(name: str) -> tuple[list[Any], Any]:
    """Return a model that is built under the schedule ``name``, and its distributed optimizer."""
    about = {"loss_rank": "first"} if name.endswith(FIRST) else {}
    installed = megatron_pp_ext.installed(name.removesuffix(FIRST), ranks=2, microbatches=4, **about)
    with nullcontext() if name.startswith("stock") else installed:
        model = own_loop.build(SCHEDULES[name], is_distributed=True)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(config, model)


def _update(model: list[Any], optimizer: Any, sign: int) -> None:
    """Update once, with gradients and so moments that differ from weight to weight."""
    for number, (_, parameter) in enumerate(own_loop.global_parameters(model)):
        parameter.main_grad.copy_(sign * (parameter.detach() + number + 1))
    optimizer.step()


def _state(model: list[Any], optimizer: Any, form: str, is_loading: bool) -> dict[str, Any]:
    about = {"distrib_optim_sharding_type": form}
    state: dict[str, Any] = {}
    for number, chunk in enumerate(model):
        state[f"model{number}"] = chunk.sharded_state_dict(metadata=about)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=about)
    return state


def _moments(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the first moments of this rank's weights by their global names."""
    (inner,) = optimizer.chained_optimizers
    return {
        name: inner._get_main_param_and_optimizer_states(parameter)["exp_avg"].clone()
        for name, parameter in own_loop.global_parameters(model)
    }
