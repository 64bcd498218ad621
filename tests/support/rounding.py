"""How far apart two computations of the same numbers may be, derived from the arithmetic alone.

Sums taken in another order differ in their last bits: on another number of ranks, with another BLAS, on
another processor.  One rounding moves a number by eps / 2 at most, anywhere in between, which as a standard
deviation is eps / sqrt(12).  Roundings in series are about independent (Higham and Mary, SIAM J. Sci. Comput.
41, 2019), so ``terms`` of them make eps * sqrt(terms / 12), and two such results are eps * sqrt(terms / 6)
apart.  What is allowed here is five times that.

Where both sides run the same kernels in the same order on one machine, tests compare bits instead.  Where
a test gives ``pytest.approx`` no tolerance, both sides are formulas in Python's floats, whose rounding is far
below its 1e-6.
"""

import math
from typing import TYPE_CHECKING

from megatron_pp_ext.compiler.limits import TOLERANCE

if TYPE_CHECKING:  # tests of schedules need no torch
    import torch

FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = 2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7
"""The eps of each type: the distance from 1 to the next number."""

TERMS = 4096
"""Roundings in series in the tiny GPT of ``training``, in its forward and in the norm of its gradients.

Forward: 424 in each of 8 layers (products over 32, 8, 32, 32, 32 and 128 numbers, a softmax over 32, two
norms that take 32 twice), 160 in the output layer and its softmax, 256 in the mean over tokens: 3808.
Norm: the largest parameter has 4096 numbers.
"""

PRINTED = 1e-6
"""The relative distance of two numbers of seven printed digits: half a unit of the last one on both sides."""

COMPILED = 3 * TOLERANCE
"""By how much of a limit or a makespan a compiled schedule may be off.

The compiler takes twice its TOLERANCE for rounding (``compiler.limits.at_most``).  The sums of a test have as
much again once: they are of a few hundred floats, some 1e-14 apart.
"""


def relative(terms: int = TERMS, eps: float = FLOAT32) -> float:
    """Return the allowed relative distance of two sums of ``terms`` numbers.

    None of their partial sums may exceed the result.
    """
    return 2 * math.sqrt(terms) * eps


def of_losses(updates: int, rate: float = 0.01) -> float:
    """Return the allowed relative distance of two losses of the tiny GPT after ``updates`` of Adam.

    Adam first moves a weight by ``rate`` whatever the size of its gradient, so a weight whose gradient is
    less than its own rounding may go either way.  The share of such weights is ``relative()``, and each
    brings twice its part of what an update does to the loss, at first order ``rate`` times the sum of all
    gradients' magnitudes: 175 at a loss of 4.2.  Noise of that size in every gradient moved the losses by up
    to 3.6e-5 after three updates, where 5.3e-5 is allowed; the gradient of one matrix off by its own size,
    by 2e-3.
    """
    return relative() * (1 + updates * 2 * rate * 175 / 4.2)


def assert_gradients_close(
    ours: "torch.Tensor", theirs: "torch.Tensor", terms: int = 3 * TERMS, name: str = ""
) -> None:
    """A parameter's gradient, each number within the rounding of the largest, since terms cancel elsewhere.

    A gradient has the roundings of the forward, of a backward twice as long and of the sum over tokens.
    """
    import torch

    allowed = relative(terms, torch.finfo(theirs.dtype).eps) * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}")
