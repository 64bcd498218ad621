"""What runs forwards and backwards in pairs by Megatron's plans of its layers."""

from megatron_pp_ext.integration.core import one_chunk_pairs, planned_weights
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_19

_WEIGHTS = "weight gradients of a backward in a pair, while tokens travel"

PAIRS = (
    Seam(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        {CORE_0_17: "self"},
        one_chunk_pairs.check_as_one_virtual_stage,
        "pairs of forwards and backwards under schedules of one chunk a rank",
    ),
    Seam(
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode.backward_dw",
        {CORE_0_17: "self", CORE_0_19: None},
        planned_weights.run_where_planned,
        _WEIGHTS,
    ),
    Seam(
        "megatron.core.models.common.utils:TransformerLayerNode.backward_dw",
        {CORE_0_19: "self"},
        planned_weights.run_where_planned,
        _WEIGHTS,
    ),
)
"""Pairs of forwards and backwards."""
