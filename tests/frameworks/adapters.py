"""Megatron-Bridge's adapters (LoRA), with numbers that depend on their layers alone, and their export."""

from typing import Any

import megatron.bridge.peft.utils
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tests.support.training import global_parameters, normal


class Adapters(LoRA):
    """Puts adapters into a model, and all of its weights by global name into ``weights``."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(dim=4, alpha=8)
        self._weights = weights
        megatron.bridge.peft.utils.HAVE_TE = False  # its stand-in has no layers to ask for

    def __call__(self, model: Any, training: bool = True) -> Any:
        adapted = super().__call__(model, training)
        self._weights.clear()
        self._weights.update(global_parameters(adapted))
        with torch.no_grad():
            for name, weight in self._weights.items():
                if weight.requires_grad:
                    weight.copy_(0.05 * normal(name, weight.shape))
        return adapted


class Export(Callback):
    """Puts the weights of ``folder``, with trained adapters merged into them, into ``exported``."""

    def __init__(self, folder: str, exported: dict[str, torch.Tensor]) -> None:
        self._folder, self._exported = folder, exported

    def on_train_end(self, context: CallbackContext) -> None:
        """Export as Bridge does."""
        weights = AutoBridge.from_hf_pretrained(self._folder).export_hf_weights(context.model, cpu=True)
        self._exported.update((name, weight.clone()) for name, weight in weights)
