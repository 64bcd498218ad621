"""Weights that a script freezes when it builds its model, by a flag of the tests."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

# isort: split
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule

FLAG = "--frozen"
KINDS = ("embedding", "output", "vocabulary", "layers", "all-but-norms", "adapters")
"""What stays as it is: one end or both ends of the model, the lower half of its layers with the embedding,
all between its ends but norms, or all but adapters of low rank (LoRA)."""

_RANK, _SCALE = 4, 8


def without_flag(flags: Sequence[str]) -> tuple[list[str], str | None]:
    """Megatron's flags, and the kind of frozen weights."""
    if FLAG not in flags:
        return list(flags), None
    at = list(flags).index(FLAG)
    return [*flags[:at], *flags[at + 2 :]], flags[at + 1]


def freeze_models(kind: str | None) -> None:
    """Let this process freeze ``kind`` in every model that it builds, as the last thing of building it."""
    if kind is not None:
        assert kind in KINDS, kind
        GPTModel.__init__ = _frozen(GPTModel.__init__, kind)


def _frozen(init: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(init)
    def build(model: GPTModel, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        if kind == "adapters":
            _adapt(model)
        for module in _modules(model, kind):
            module.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if (kind == "adapters" and ".adapter." not in name) or (
                kind == "all-but-norms" and name.startswith("decoder.") and "norm" not in name
            ):
                parameter.requires_grad_(False)

    return build


def _modules(model: GPTModel, kind: str) -> list[torch.nn.Module]:
    """The frozen modules; both ends of a tied model are frozen together, as stock waits for ever else."""
    names = {"embedding": ["embedding"], "output": ["output_layer"], "layers": ["embedding"]}
    names["vocabulary"] = ["embedding", "output_layer"]
    attributes = names.get(kind, [])
    if attributes and model.share_embeddings_and_output_weights:
        attributes = names["vocabulary"]
    modules = [getattr(model, name) for name in attributes if hasattr(model, name)]
    if kind == "layers":
        half = model.config.num_layers // 2
        modules += [layer for layer in model.decoder.layers if layer.layer_number <= half]
    return modules


class Adapter(MegatronModule):
    """The adapter of LoRA (arXiv 2106.09685) for a layer whose outputs are cut over tensor-parallel ranks."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        config = layer.config
        super().__init__(config)
        self.down = torch.nn.Linear(layer.input_size, _RANK, bias=False, dtype=config.params_dtype)
        self.down.weight.sequence_parallel = config.sequence_parallel
        self.up = ColumnParallelLinear(
            _RANK, layer.output_size, config=config, init_method=config.init_method, bias=False
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the addition to the layer's output, for the same input."""
        added: torch.Tensor = self.up(self.down(hidden))[0]
        return _SCALE * added


def _adapt(model: GPTModel) -> None:
    """Give every attention an adapter, and layers that are recomputed an input with a gradient.

    Without the latter Megatron's full recomputation brings no gradient to the first stage.
    """
    for module in list(model.modules()):
        if hasattr(module, "linear_qkv"):
            _adapt_attention(module)
    if model.pre_process:
        model.embedding.register_forward_hook(lambda _module, _input, output: output.requires_grad_())


def _adapt_attention(attention: Any) -> None:
    """Give ``attention`` an adapter for its product of queries, keys and values."""
    layer = attention.linear_qkv
    attention.adapter = adapter = Adapter(layer)
    stock = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = stock(hidden, *args, **kwargs)
        return output + adapter(hidden), bias

    layer.forward = forward
