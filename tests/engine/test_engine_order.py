"""Why microbatch 0 has to be first: what Transformer Engine's layers do with its weight gradient."""

import sys

import pytest
import torch

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

import transformer_engine.pytorch as engine

from megatron_pp_ext.megatron.core.engine_linear import split_backwards
from megatron_pp_ext.runtime.split import STORE, Owner

ROWS, WIDTH, OUT = 6, 4, 3


def main_grad(order, is_first):
    """The sum of two microbatches' weight gradients, whose W run in ``order``.

    ``is_first`` says of each what Megatron tells its forward.
    """
    torch.manual_seed(0)
    layer = engine.Linear(
        WIDTH, OUT, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.float32, device="cpu"
    )
    layer.weight.main_grad = torch.zeros(OUT, WIDTH)
    split_backwards([layer])
    for microbatch in (0, 1):
        input = torch.randn(ROWS, WIDTH).requires_grad_()
        output = layer(input, is_first_microbatch=is_first[microbatch])
        with STORE.collecting(Owner(0, microbatch)):
            output.square().sum().backward()
    for microbatch in order:
        STORE.run(Owner(0, microbatch))
    return layer.weight.main_grad


def test_the_first_forward_s_gradient_overwrites_those_before_it():
    whole = main_grad((0, 1), is_first=(None, None))
    assert torch.equal(main_grad((0, 1), is_first=(True, False)), whole)
    assert not torch.equal(main_grad((1, 0), is_first=(True, False)), whole)
    # The sum of two numbers is the same in either order.
    assert torch.equal(main_grad((1, 0), is_first=(False, False)), whole)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_without_a_first_forward_gradients_are_added_in_any_order(order):
    """So it is in later updates of a pipeline without a flush."""
    assert torch.equal(main_grad(order, (False, False)), main_grad((0, 1), (None, None)))
