"""The weight gradients of a backward in a pair, at the places that Megatron's plans of layers have for them.

A plan calls ``backward_dw`` of its nodes where Megatron would compute weight gradients that Transformer
Engine has put off (--delay-wgrad-compute): behind the input gradients of experts, while tokens travel, and
behind those of the attention.  Here ``runtime.split`` puts them off, for local layers too.
"""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.runtime.split import STORE


@around
def run_where_planned(stock: Callable[[Any], None], self: Any) -> None:
    """Run the weight gradients that a backward in a pair has put off so far.

    Seam: ``TransformerLayerNode.backward_dw`` in ``megatron.core.models.common.utils``, and before 0.19 in
    ``megatron.core.models.gpt.fine_grained_callables``.
    """
    stock(self)
    STORE.run_part()
