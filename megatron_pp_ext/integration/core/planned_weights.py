"""The weight gradients of a backward in a pair, at the places that Megatron's plans of layers have for them.

A plan calls ``backward_dw`` of its nodes where Megatron would compute weight gradients that Transformer
Engine has put off (--delay-wgrad-compute): behind the input gradients of experts, while tokens travel, and
behind those of the attention.  Here ``runtime.split`` puts them off, for local layers too.
"""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_19
from megatron_pp_ext.runtime.split import STORE

_WHY = "weight gradients of a backward in a pair, while tokens travel"


@hook(
    "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode.backward_dw",
    {CORE_0_17: "self", CORE_0_19: None},
    _WHY,
)
@hook(
    "megatron.core.models.common.utils:TransformerLayerNode.backward_dw",
    {CORE_0_19: "self"},
    _WHY,
)
def run_where_planned(stock: Callable[[Any], None], self: Any) -> None:
    """Run the weight gradients that a backward in a pair has put off so far."""
    stock(self)
    STORE.run_part()
