"""Nesterov's step with Megatron's own optimizers, for gradients that come late (arXiv 2505.01099).

The paper trains with torch's NAdam and beta1 = 0.99: the weights after a step are the point to which momentum
would lead next, and a late gradient counts little beside it.  Megatron has no NAdam.  Here its Adam, whose
state is NAdam's, makes its step, and the weights move on by the difference.  Nothing is added to the state,
so that a checkpoint is like any other.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.schedule.updates import DelayCorrection

_DECAY = 0.96**0.004
"""By how much a step shrinks what NAdam's momentum lacks of its full size (Dozat 2016; torch's default)."""

_FACTORS = 200
"""Each factor is below 0.6 as long as it matters: more of them leave nothing of a product in float64."""


@hook(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
    "self optimizer config init_state_fn",
    "--pipeline-delay-correction nesterov in a pipeline that never flushes",
)
def look_ahead_by_momentum(
    stock: Callable[..., None], self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Let an optimizer of Megatron's take Nesterov's steps."""
    stock(self, optimizer, config, *args, **kwargs)
    if optimizer is not None and _is_requested():
        if config.optimizer == "adam" and not config.decoupled_weight_decay:
            raise ValueError(
                "decoupled_weight_decay is off in the optimizer's config, but "
                "--pipeline-delay-correction nesterov needs gradients without weight decay; turn it on"
            )
        take_nesterov_steps(optimizer, config.optimizer)


def _is_requested() -> bool:
    pipeline = requested.pipeline()
    updates = pipeline.updates if pipeline else None
    return updates is not None and updates.correction is DelayCorrection.NESTEROV


def take_nesterov_steps(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Let ``optimizer``, of ``name`` adam or sgd, take Nesterov's steps from now on."""
    if name == "sgd":
        # Only while it steps: its groups go into checkpoints, from which stock would take the setting over.
        optimizer.register_step_pre_hook(functools.partial(_set_nesterov, True))
        optimizer.register_step_post_hook(functools.partial(_set_nesterov, False))
    else:
        optimizer.register_step_post_hook(_go_on_to_nadam)


def _set_nesterov(value: bool, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["nesterov"] = value


@torch.no_grad()
def _go_on_to_nadam(adam: torch.optim.Optimizer, *_: Any) -> None:
    """Move the weights from where Adam's step has brought them to where NAdam's would have."""
    for group in adam.param_groups:
        (beta1, beta2), rate, eps = group["betas"], group["lr"], group["eps"]
        for parameter in group["params"]:
            gradient, state = parameter.grad, adam.state[parameter]
            if gradient is None:
                continue
            # torch counts steps once a parameter, Apex and Transformer Engine once a group.
            step = int(state["step"] if "step" in state else group["step"])
            of_moment, of_gradient = _more_than_adam(beta1, step)
            size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(eps)
            further = (state["exp_avg"] * of_moment).add_(gradient, alpha=of_gradient)
            parameter.addcdiv_(further.to(size.dtype), size, value=-rate)


@functools.lru_cache(maxsize=4)
def _more_than_adam(beta1: float, step: int) -> tuple[float, float]:
    """Return the factors of moment and gradient in NAdam's step, less those in Adam's, at ``step`` >= 1."""

    def momentum(number: int) -> float:
        return float(beta1 * (1 - 0.5 * _DECAY**number))

    product = math.prod(map(momentum, range(1, min(step, _FACTORS) + 1)))
    following = momentum(step + 1)
    of_moment = following / (1 - product * following) - 1 / (1 - beta1**step)
    return of_moment, (1 - momentum(step)) / (1 - product)
