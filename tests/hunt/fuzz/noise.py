"""What of a difference from stock is rounding: how far stock's own numbers move when last bits do.

Where a sum is taken in another order, the first step's gradients differ in their last bits, and nothing
bounds what becomes of that: Adam moves a weight by its full rate whatever the size of its gradient, the
weight rounds to another number of bf16, and a token goes to another expert.  How much that moves a loss
depends on the job, so it is measured in the job: stock trains again, with noise of one last bit in all
gradients of every step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import NamedTuple

import torch

from megatron_pp_ext.megatron.core.parameters import global_parameters
from megatron_pp_ext.verification.verdict import relative
from tests.support import rounding, training
from tests.support.comparison import Result

DRAWS = 3
"""How often stock trains with noise.  One draw may by chance move a number little."""

_LAST_BIT = {"fp32": rounding.FLOAT32, "bf16": rounding.BFLOAT16, "fp16": rounding.FLOAT16}


class Noise(NamedTuple):
    """The largest relative distance of two runs of stock in any step; losses are those of evaluations too."""

    losses: float = 0.0
    norms: float = 0.0
    logged: float = 0.0


SILENCE = Noise()
BOUNDLESS = Noise(math.inf, math.inf, math.inf)
"""Leaves only such differences as no noise explains."""


@dataclass
class LastBits:
    """Adds noise to all gradients: one last bit of ``precision`` at the tensor's root mean square.

    Terms of a sum cancel, so its rounding goes by the size of the terms, which is that of the other numbers
    of a tensor.  Every rank that has a parameter adds the same; another ``draw`` adds other numbers.
    """

    precision: str
    draw: int
    updates: int = 0

    def __call__(self, chunks: list[torch.nn.Module]) -> None:
        self.updates += 1
        for name, parameter in global_parameters(chunks):
            if not parameter.requires_grad:
                continue
            gradient = parameter.main_grad
            bit = _LAST_BIT[self.precision] * gradient.float().square().mean().sqrt()
            gradient += bit * training.normal(f"{name} {self.draw} {self.updates}", gradient.shape)


def between(stock: Result, noisy: Sequence[Result]) -> Noise:
    """Return how far ``noisy`` runs of stock are from ``stock``, where both did the step."""
    losses = [zip(_losses(stock), _losses(run), strict=True) for run in noisy]
    norms = [zip(stock.norms, run.norms, strict=True) for run in noisy]
    logged = [_logged(stock, run) for run in noisy]
    return Noise(*(_largest(chain.from_iterable(pairs)) for pairs in (losses, norms, logged)))


def _losses(run: Result) -> list[float]:
    return [*run.losses, *run.validation]


def _logged(stock: Result, run: Result) -> Iterator[tuple[float, float]]:
    for theirs, mine in zip(stock.logged, run.logged, strict=False):
        yield from ((float(theirs[name]), float(mine[name])) for name in theirs.keys() & mine.keys())


def _largest(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    return max(filter(math.isfinite, starmap(relative, pairs)), default=0.0)
