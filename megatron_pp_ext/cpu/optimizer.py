"""Let the distributed optimizer resume with torch's Adam and fp32 weights.

On a GPU machine Megatron's Adam comes from Apex or Transformer Engine, which count steps once a group.
Without them it is torch's, which counts steps once a parameter. With torch's, Megatron saves a distributed
optimizer and then cannot load it: it reads the step of a fresh optimizer, which has none yet; it looks for
the step where a checkpoint holds none, or sets it back to zero; and it lets all parameters share one counter,
which each of them would increase.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_pp_ext.around import around


@around
def give_state(state_dict: Callable[..., Any], self: Any) -> Any:
    """Give an Adam that has not stepped the state with which it would begin its first step."""
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
