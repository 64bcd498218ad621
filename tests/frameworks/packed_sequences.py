"""Megatron-Bridge's step on packed sequences, with an attention that needs no kernels.

Each microbatch has several sequences of lengths that vary, one after the other.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.bridge.training import gpt_step

from tests.frameworks.megatron_bridge import layers_of
from tests.frameworks.packed_attention import PackedAttention


def packed_layers(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers of one chunk with ``PackedAttention``."""
    spec = layers_of(config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def packed_step(state: Any, data_iterator: Iterator[Any], model: Any) -> Any:
    """Do Bridge's step with the sequences of a microbatch packed."""
    state.cfg.dataset.enable_in_batch_packing = True  # stages between the ends need their lengths too
    return gpt_step.forward_step(state, _packed(data_iterator), model)


def _packed(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in iter(batches.__next__, None):
        length = batch["tokens"].shape[1]
        first = 1 + int(batch["tokens"].sum()) % (length - 2)
        ends = torch.tensor([[0, first, first + (length - first) // 2, length]], dtype=torch.int32)
        longest = ends.diff().max().reshape(1)
        yield {
            **batch,
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
