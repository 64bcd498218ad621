"""A layer that works on slices of a sequence: its gradients and its rate against the whole sequence's.

python -m benchmarks.gpu.layers prefix 4096 [--dry]
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import in_turns
from megatron_pp_ext.features.units.runtime import Sequence
from megatron_pp_ext.runtime.split import Owner

LENGTH, HEADS, WIDTH = 32_768, 32, 128
REPEATS = 5

FURTHEST = 1.5
"""How much further from fp32 slices may be than whole sequences, both in bf16."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries, keys, values), each [tokens, 1, heads, width] -> [tokens of the queries, 1, hidden]."""


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention by a mask whose diagonal ends at the last query and key; it keeps all logits."""
    rows, columns = len(query), len(key)
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def of_engine(heads: int, width: int) -> Attention:
    """Transformer Engine's attention with the mask of ``features.units.megatron.layers``."""
    import transformer_engine.pytorch as engine

    module = engine.DotProductAttention(
        heads, width, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal_bottom_right"
    )
    attend: Attention = partial(module, attn_mask_type="causal_bottom_right")
    return attend


class Layer(torch.nn.Module):
    """A transformer layer without norms, whose attention reads the keys of earlier slices."""

    def __init__(self, heads: int, width: int, attention: Attention) -> None:
        super().__init__()
        hidden = heads * width
        self.heads, self.attention = heads, attention
        self.qkv, self.out = (torch.nn.Linear(hidden, size * hidden, bias=False) for size in (3, 1))
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, input: torch.Tensor, sequence: Sequence, start: int) -> torch.Tensor:
        """``input`` [tokens, 1, hidden], the part of a ``sequence`` from ``start`` on, to the same shape."""
        query, key, value = self.qkv(input).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        key, value = sequence.grown("key", key, start), sequence.grown("value", value, start)
        middle = input + self.out(self.attention(query.contiguous(), key, value))
        result: torch.Tensor = middle + self.down(torch.nn.functional.gelu(self.up(middle)))
        return result


def trained(layer: Layer, input: torch.Tensor, tokens: int) -> tuple[float, list[torch.Tensor]]:
    """Run forwards of slices of so many tokens, and their backwards in reverse.

    Return the seconds, and the gradients of the input and of all weights, added up in fp32 as Megatron does.
    """
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in layer.parameters()]
    sequence = Sequence(Owner(0, 0), len(input))
    inputs = [part.detach().requires_grad_() for part in input.split(tokens)]
    _wait()
    begin = time.perf_counter()
    outputs = [layer(part, sequence, number * tokens) for number, part in enumerate(inputs)]
    for output in reversed(outputs):
        output.backward(torch.ones_like(output))
        for total, weight in zip(sums, layer.parameters(), strict=True):
            assert weight.grad is not None
            total += weight.grad
            weight.grad = None
    _wait()
    seconds = time.perf_counter() - begin
    return seconds, [torch.cat([part.grad.float() for part in inputs if part.grad is not None]), *sums]


def _seconds(layer: Layer, input: torch.Tensor, tokens: int) -> float:
    return trained(layer, input, tokens)[0]


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Return how far the first gradients are from the others, by their norm."""
    squares = sum(float((a - b).square().sum()) for a, b in zip(first, second, strict=True))
    return (squares / sum(float(b.square().sum()) for b in second)) ** 0.5


def prefix(
    name: str, length: int, heads: int, width: int, attention: Attention, device: str
) -> dict[str, object]:
    """Return the row of units of ``name`` tokens: their seconds over the whole, and how exact gradients are.

    Gradients in bf16 are held against those of a shorter sequence in fp32, whose attention keeps all logits.
    """
    tokens, dtype = int(name), torch.bfloat16
    torch.manual_seed(1)
    layer = Layer(heads, width, attention).to(device=device, dtype=dtype)
    short = torch.randn(4 * min(tokens, length // 16), 1, heads * width, device=device, dtype=dtype)
    exact = Layer(heads, width, masked).to(device=device)
    exact.load_state_dict(layer.state_dict())
    gradients: dict[str, list[torch.Tensor]] = {}
    for kind, model, cut in (("exact", exact, 1), ("whole", layer, 1), ("sliced", layer, 4)):
        input = short.to(next(model.parameters()).dtype)
        _, gradients[kind] = trained(model, input, len(input) // cut)
    whole, sliced = (distance(gradients[kind], gradients["exact"]) for kind in ("whole", "sliced"))
    del exact, gradients
    long = torch.randn(length, 1, heads * width, device=device, dtype=dtype)
    ways = {size: partial(_seconds, layer, long, size) for size in (length, tokens)}
    seconds = {size: median(of_size) for size, of_size in in_turns(ways, rounds=REPEATS, warm_up=1).items()}
    cells: dict[str, Any] = {
        "tokens": length,
        "whole ms": f"{1e3 * seconds[length]:.2f}",
        "in slices ms": f"{1e3 * seconds[tokens]:.2f}",
        "ratio": f"{seconds[tokens] / seconds[length]:.3f}",
        "whole from fp32": f"{whole:.1e}",
        "slices from fp32": f"{sliced:.1e}",
        "goal": "met" if sliced <= FURTHEST * whole else f"not met: {FURTHEST} of the whole's",
    }
    return cells
