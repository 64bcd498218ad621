"""Megatron's fine-grained offloading on ranks without a device, where its flags ask for Transformer Engine.

Its manager asks of a tensor whether it is on a device, and of Transformer Engine to leave weights alone.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as stock
from megatron.core.transformer.transformer_config import TransformerConfig

MODULES = ("attn_norm", "qkv_linear", "mlp_norm")
"""With core_attn, Megatron's own 1F1B has other gradients where attention is not Transformer Engine's."""


def switch_on(monkeypatch: pytest.MonkeyPatch, modules: Sequence[str] = MODULES, **settings: Any) -> None:
    """Let ranks that are forked from here offload ``modules``; ``settings`` are those of the config."""
    check = TransformerConfig.__post_init__

    def check_with_offload(config: TransformerConfig) -> None:
        config.fine_grained_activation_offloading = True
        config.offload_modules = list(modules)
        config.min_offloaded_tensor_size = 1
        for name, value in settings.items():
            setattr(config, name, value)
        check(config)

    monkeypatch.setattr(TransformerConfig, "__post_init__", check_with_offload)
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    handler = stock.ChunkOffloadHandler
    if hasattr(handler, "_can_manage_tensor_for_offload"):
        can_manage = staticmethod(lambda tensor: type(tensor) is torch.Tensor)
        monkeypatch.setattr(handler, "_can_manage_tensor_for_offload", can_manage)
