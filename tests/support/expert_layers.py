"""Stand-ins for Transformer Engine's modules of experts: grouped products, and products to a latent width.

Importing this module puts the latter into ``megatron.core.transformer.moe.moe_layer``, which takes
Transformer Engine for absent on a CPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch.nn import functional

Initializer = Callable[[torch.Tensor], Any]


class Linear(torch.nn.Module):
    """Transformer Engine's linear layer where every rank has its weight whole."""

    def __init__(
        self, read: int, result: int, config: Any, init_method: Initializer, bias: bool, **unused: Any
    ):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(result, read, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(result, dtype=config.params_dtype)) if bias else None
        init_method(self.weight)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(input, self.weight, self.bias), None


class GroupedLinear(torch.nn.Module):
    """A linear layer for each expert, which have names as in Transformer Engine."""

    def __init__(
        self,
        experts: int,
        read: int,
        result: int,
        config: Any,
        init_method: Initializer,
        bias: bool,
        skip_bias_add: bool,
        **unused: Any,
    ):
        super().__init__()
        self.experts, self.skips_bias = experts, skip_bias_add
        for expert in range(experts):
            weight = torch.nn.Parameter(torch.empty(result, read, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{expert}", weight)
            zeros = torch.nn.Parameter(torch.zeros(result, dtype=config.params_dtype)) if bias else None
            self.register_parameter(f"bias{expert}", zeros)

    def forward(self, input: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, Any]:
        biases = [getattr(self, f"bias{expert}") for expert in range(self.experts)]
        added = [None] * self.experts if self.skips_bias else biases
        results = [
            functional.linear(part, getattr(self, f"weight{expert}"), added[expert])
            for expert, part in enumerate(input.split(tokens))
        ]
        return torch.cat(results), biases if self.skips_bias and biases[0] is not None else None


class _Grouped(LocalSpecProvider):
    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        parts = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return partial(TEGroupedMLP, submodules=parts)


def experts(is_grouped: bool) -> Any:
    """Return the spec of a layer's experts: in one product for all of them, or one after the other."""
    spec = get_moe_module_spec(use_te=False, num_experts=4)
    if is_grouped:
        spec.keywords["submodules"].experts = _Grouped().grouped_mlp_modules(True)
    return spec


class _NoFP8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear
# Recomputation that discards an output asks for these, without Transformer Engine too.
random.FP8GlobalStateManager = _NoFP8
random.activation_recompute_forward = random.fp8_autocast = lambda **how: nullcontext()
