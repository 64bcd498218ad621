"""GPTs whose tokens meet in ways that slices of sequences may know, or may not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tests.support import own_loop, own_loop_experts


class LooksAhead(DotProductAttention):
    """Attention by causal scores whose values are the next token's."""

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **about: Any) -> Any:
        """See ``DotProductAttention``."""
        return super().forward(query, key, value.roll(-1, 0), *args, **about)


class Decays(DotProductAttention):
    """Attention whose values fade with their places, which it counts from the first query."""

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **about: Any) -> Any:
        """See ``DotProductAttention``."""
        fading = torch.linspace(1, 0.1, len(query)).repeat(2)[: len(value), None, None, None]
        return super().forward(query, key, value * fading, *args, **about)


class OwnPositions(torch.nn.Module):
    """Rotary positions of a class that slices do not know."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = [stock]

    def get_rotary_seq_len(self, *about: Any) -> int:
        """See ``RotaryEmbedding``."""
        return int(self.stock[0].get_rotary_seq_len(*about))

    def forward(self, length: int, **about: Any) -> Any:
        """See ``RotaryEmbedding``."""
        return self.stock[0].forward(length, **about)


class PairsOfWords(torch.nn.Module):
    """An embedding that adds that of the word before."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.word_embeddings, self.stock = stock.word_embeddings, stock

    def forward(self, input_ids: Any, position_ids: Any) -> Any:
        """See ``LanguageModelEmbedding``."""
        before = self.stock(input_ids=input_ids.roll(1, 1), position_ids=position_ids)
        return self.stock(input_ids=input_ids, position_ids=position_ids) + before


class WithScale(GPTModel):
    """A model whose forward needs an argument of its own."""

    def forward(self, *args: Any, scale: float, **about: Any) -> Any:
        """See ``GPTModel``."""
        return super().forward(*args, **about)


def gpt(config: Any, attention: Any = DotProductAttention, kind: Any = GPTModel, **arguments: Any) -> Any:
    """Return a GPT with rotary positions."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = attention
    return kind(config, spec, position_embedding_type="rope", **arguments)


def mixed(mix: Callable[[torch.Tensor], torch.Tensor], config: Any, **arguments: Any) -> GPTModel:
    """Return a model whose last layer's input is mixed along the tokens, where it is in this chunk."""
    model = gpt(config, **arguments)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": mix(kwargs["hidden_states"])}

    for layer in model.decoder.layers:
        if layer.layer_number == own_loop.LAYERS:
            layer.register_forward_pre_hook(before, with_kwargs=True)
    return model


def shifted(hidden: torch.Tensor) -> torch.Tensor:
    """Add to each token half of the one before."""
    return hidden + 0.5 * torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])


def convolved(hidden: torch.Tensor) -> torch.Tensor:
    """Add a causal convolution that begins with weights of zero."""
    weight = hidden.new_zeros(hidden.shape[-1], 1, 3)
    padded = torch.nn.functional.pad(hidden.permute(1, 2, 0), (2, 0))
    return hidden + torch.nn.functional.conv1d(padded, weight, groups=len(weight)).permute(2, 0, 1)


def attended(hidden: torch.Tensor) -> torch.Tensor:
    """Add a little of a causal attention without weights."""
    scores = torch.einsum("sbh,tbh->bst", hidden, hidden).tril()
    return hidden + torch.einsum("bst,tbh->sbh", scores, hidden) * 1e-3


def with_own_positions(config: Any, **arguments: Any) -> GPTModel:
    """Return a model with ``OwnPositions``."""
    model = gpt(config, **arguments)
    model.rotary_pos_emb = OwnPositions(model.rotary_pos_emb)
    return model


def with_pairs_of_words(config: Any, **arguments: Any) -> GPTModel:
    """Return a model with ``PairsOfWords``."""
    model = gpt(config, **arguments)
    if model.pre_process:
        model.embedding = PairsOfWords(model.embedding)
    return model


def with_a_layer_twice(config: Any, **arguments: Any) -> GPTModel:
    """Return a model that calls the first layer of each chunk twice."""
    model = gpt(config, **arguments)
    layer = model.decoder.layers[0]

    def forward(hidden_states: Any, **about: Any) -> Any:
        between, _ = type(layer).forward(layer, hidden_states=hidden_states, **about)
        return type(layer).forward(layer, hidden_states=between, **about)

    layer.forward = forward
    return model


_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
_MEETS = "the output of a token depends on other tokens"

_PREDICTION = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
_EARLY = {
    "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 8, "mtp"], ["loss"]],
    "mtp_standalone": True,
}


def predicting_with_shift(config: Any, **arguments: Any) -> Any:
    """A model with a token shift in its layer of multi-token prediction alone."""
    model = own_loop.predicting(config, **arguments)
    if model.mtp_process:
        model.mtp.layers[0].final_layernorm.register_forward_hook(lambda *call: shifted(call[-1]))
    return model


MODELS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "plain": ("", gpt, {}),
    "learned positions": ("", own_loop.gpt, {}),
    "windows": ("", gpt, {"window_size": (3, 0)}),
    "dropout": ("", gpt, {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    "sinks": ("", gpt, {"softmax_type": "learnable"}),
    "recomputation": ("", gpt, _RECOMPUTED),
    "experts": (
        "",
        own_loop_experts.gpt_of_experts,
        {**own_loop_experts.EXPERTS, "expert_model_parallel_size": 1, **_BALANCED},
    ),
    "prediction": ("", own_loop.predicting, _PREDICTION),
    "prediction before the last stage": ("", own_loop.predicting, {**_PREDICTION, **_EARLY}),
    "token shift in a prediction": (_MEETS, predicting_with_shift, _PREDICTION),
    "token shift": (_MEETS, partial(mixed, shifted), {}),
    "convolution": (_MEETS, partial(mixed, convolved), {}),
    "own attention": (_MEETS, partial(mixed, attended), {}),
    "pairs of words": ("the embedding of a token depends on other tokens", with_pairs_of_words, {}),
    "own positions": ("the query of a token is another in a slice", with_own_positions, {}),
    "a layer twice": ("a forward calls a layer 2 times", with_a_layer_twice, {}),
    "values ahead": ("LooksAhead gives other results in slices", partial(gpt, attention=LooksAhead), {}),
    "decay": ("Decays gives other results in slices", partial(gpt, attention=Decays), {}),
}
"""What the line has that refuses a model, empty where slices can train it; the model; and its settings."""

with_scale = partial(gpt, kind=WithScale)


def step_with_scale(iterator: Any, model: Any) -> Any:
    """The forward step of ``with_scale``."""
    output, loss = own_loop.forward_step(iterator, partial(model, scale=1.0))
    return output, loss
