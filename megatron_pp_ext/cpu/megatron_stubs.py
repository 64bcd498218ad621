"""Megatron's functions that need a GPU, for a CPU: attention, norms, and the distributed optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_pp_ext.around import around


@around
def accept_context_parallelism(
    make: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Make the attention of a model that is not context-parallel.

    ValueError for any other attention than the plain causal one, since its mask is not known here.
    """
    if config.context_parallel_size == 1:
        make(self, config, *args, **kwargs)
        return
    plain = copy.copy(config)
    plain.context_parallel_size = 1
    make(self, plain, *args, **kwargs)
    if self.attn_mask_type.name != "causal" or self.scale_mask_softmax.window_size is not None:
        raise ValueError(
            f"--context-parallel-size {config.context_parallel_size} on a CPU is for causal attention "
            "without a window; set it to 1, or leave the window out"
        )


@around
def attend_to_all_ranks(
    attend: Callable[..., Any],
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give this rank's queries (sequence, batch, heads, head) the keys and values of all ranks.

    With --context-parallel-size n, rank r holds two of the 2n pieces of a sequence, r and 2n - 1 - r, so that
    causal attention is the same work for all ranks. Only Transformer Engine's attention looks beyond these
    pieces. On a CPU the keys and values of all ranks are gathered instead, which takes the memory that
    context parallelism is there to save. A mask of the batch gets its columns in the order of the gathered
    pieces; where there is none, it follows from their positions.
    """
    group = getattr(self.pg_collection, "cp", None)
    if group is not None and group.size() > 1:
        # Megatron's gather along the first dimension, whose gradients are summed over the ranks.
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        places = _places(query.size(0), group)
        attention_mask = (
            # A batch has the rows of this rank's queries, and a column for each key in its true place.
            _beyond(places, group) if attention_mask is None else attention_mask[..., places.flatten()]
        )
    return attend(self, query, key, value, attention_mask, *args, **kwargs)


def _places(length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the places (ranks, length) in the sequence of the tokens that each rank holds."""
    early, late = torch.arange(group.size() * length).view(2 * group.size(), -1).chunk(2)
    return torch.cat([early, late.flip(0)], dim=1)


def _beyond(places: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mask (1, 1, queries, keys) of the gathered keys that come after each query of this rank."""
    return (places.flatten() > places[group.rank()].unsqueeze(1)).unsqueeze(0).unsqueeze(0)


@around
def mark_for_sequence_parallelism(
    make: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make the norm of a model that is not sequence-parallel, and mark its parameters.

    With --sequence-parallel a norm gets a part of the sequence on each tensor-parallel rank, so the gradients
    of its weight and bias have to be summed over these ranks. Megatron does so for the parameters that have
    the attribute ``sequence_parallel``, which the norms of Apex and Transformer Engine set. The norms of
    torch, which Megatron takes where neither is installed, do not set it, and Megatron refuses to make them.
    """
    if not config.sequence_parallel:
        return make(cls, config, *args, **kwargs)
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = make(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@around
def give_state(state_dict: Callable[..., Any], self: Any) -> Any:
    """Give an Adam that has not stepped the state with which it would begin its first step.

    On a GPU machine Megatron's Adam comes from Apex or Transformer Engine, which count steps once a group.
    Without them it is torch's, which counts steps once a parameter. With torch's, Megatron saves a
    distributed optimizer and then cannot load it: it reads the step of a fresh optimizer, which has none yet;
    it looks for the step where a checkpoint holds none, or sets it back to zero; and it lets all parameters
    share one counter, which each of them would increase.
    """
    adam = self.optimizer
    if isinstance(adam, torch.optim.Adam) and not adam.state:
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return state_dict(self)


@around
def give_own_counters(load_state_dict: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Give each parameter a step counter of its own after loading.

    Loading also copies into the weights; those that are fp32 are the model's own and require gradients.
    """
    with torch.no_grad():
        result = load_state_dict(self, *args, **kwargs)
    for state in self.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    return result


@around
def load_without_gradients(load: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint of one file without gradients, which weights that are the model's own require."""
    with torch.no_grad():
        return load(self, *args, **kwargs)


@around
def keep_own_step(
    set_states: Callable[..., Any], self: Any, model_param: Any, tensors: dict[str, Any]
) -> Any:
    """Keep the step: it was loaded with the groups, and the parameters' own state has none or an old one."""
    states = self._get_main_param_and_optimizer_states(model_param)
    step = {"step": states["step"]} if "step" in states else {}
    return set_states(self, model_param, {**tensors, **step})
