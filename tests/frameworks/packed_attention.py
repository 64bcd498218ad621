"""Attention within the sequences of a pack, by a mask in place of Transformer Engine's kernels."""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


class PackedAttention(DotProductAttention):
    """Causal attention within each sequence of a pack, by a mask in place of Transformer Engine's kernels."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        ends = packed_seq_params.cu_seqlens_q[1:]
        place = torch.arange(len(query))
        sequence = torch.bucketize(place, ends, right=True)
        hidden = (sequence[:, None] != sequence) | (place[:, None] < place)
        batched = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return super().forward(*batched, hidden[None, None], *args, **kwargs)
