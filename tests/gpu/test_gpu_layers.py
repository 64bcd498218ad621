"""On a GPU: a cut backward adds up to a whole one, bit for bit, whoever made the layer.

Run by scripts/gpu_check.sh, without the stand-ins that the other tests need.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch

from megatron_pp_ext.runtime.split import STORE, Owner
from tests.support import rounding
from tests.support.split_linear import SplitLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no CUDA device"),
]

TOKENS, WIDTH, OUT, MICROBATCHES = 256, 512, 1024, 3


def _engine() -> Any:
    return pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")


def _gradients(layer, split, call):
    """Of the inputs of all microbatches, and of all parameters; every forward comes before every backward."""
    accumulators = []
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        accumulators.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(functools.partial(_move, parameter))
    generator = torch.Generator("cuda").manual_seed(1)
    inputs, outputs = [], []
    for _ in range(MICROBATCHES):
        values = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        inputs.append(values.requires_grad_())
        outputs.append(call(inputs[-1]))
    for microbatch, output in enumerate(outputs):
        gradient = torch.randn(output.shape, device="cuda", dtype=output.dtype, generator=generator)
        with STORE.collecting(Owner(0, microbatch)) if split else nullcontext():
            output.backward(gradient)
    for microbatch in range(MICROBATCHES if split else 0):
        STORE.run(Owner(0, microbatch))
    return [one.grad for one in inputs], {name: p.main_grad for name, p in layer.named_parameters()}


def _move(parameter: Any, *_: Any) -> None:
    """As Megatron's data parallelism does with a gradient that autograd brings."""
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def _assert_same(make: Callable[[], torch.nn.Module], call: Callable[..., torch.Tensor]) -> None:
    from megatron_pp_ext.megatron.core.engine_linear import split_backwards

    whole, cut = make(), make()
    cut.load_state_dict(whole.state_dict())
    expected_inputs, expected = _gradients(whole, split=False, call=lambda x: call(whole, x))
    split_backwards([cut])
    inputs, found = _gradients(cut, split=True, call=lambda x: call(cut, x))
    assert all(map(torch.equal, inputs, expected_inputs))
    assert all(gradient.any() for gradient in expected.values())
    different = [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])]
    assert not different


def _layers(engine: Any, fused: bool) -> dict[str, Callable[[], torch.nn.Module]]:
    about = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    return {
        "Linear": lambda: engine.Linear(WIDTH, OUT, **about),
        "LayerNormLinear": lambda: engine.LayerNormLinear(WIDTH, OUT, **about),
        "GroupedLinear": lambda: engine.GroupedLinear(2, WIDTH, OUT, **about),
    }


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_transformer_engine(name: str, fused: bool) -> None:
    _assert_same(_layers(_engine(), fused)[name], _call)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
def test_transformer_engine_in_fp8(name: str, recipe: str) -> None:
    """The scaling state that a W finds is that of its I, whatever ran in between."""
    engine = _engine()
    from transformer_engine.common import recipe as recipes

    if not hasattr(recipes, recipe):
        pytest.skip(f"this Transformer Engine has no {recipe}")
    is_there, why = _fp8_checks(engine).check_fp8_support()
    if is_there and recipe == "Float8BlockScaling":
        is_there, why = _fp8_checks(engine).check_fp8_block_scaling_support()
    if not is_there:
        pytest.skip(why)

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        with _in_fp8(engine, getattr(recipes, recipe)()):
            return _call(layer, x)

    _assert_same(_layers(engine, fused=True)[name], call)


def _fp8_checks(engine: Any) -> Any:
    """The module that tells what the device can do: it moved in 2.9, and is imported by name."""
    is_moved = hasattr(engine, "autocast")
    return import_module(f"transformer_engine.pytorch.{'quantization' if is_moved else 'fp8'}")


def _in_fp8(engine: Any, recipe: Any) -> AbstractContextManager[Any]:
    """The name of 2.9 and later where it is there: the older one warns, and is to go."""
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=recipe)
    return engine.fp8_autocast(enabled=True, fp8_recipe=recipe)


def _call(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(layer, "num_gemms"):
        return layer(x, [TOKENS // layer.num_gemms] * layer.num_gemms)
    return layer(x)


def test_plain_linear() -> None:
    """Torch adds up a plain layer's gradients in its own dtype."""
    torch.manual_seed(0)
    cut = SplitLinear(WIDTH, OUT, device="cuda", dtype=torch.bfloat16)
    whole = torch.nn.Linear(WIDTH, OUT, device="cuda", dtype=torch.bfloat16)
    whole.load_state_dict(cut.state_dict())
    inputs = [torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(MICROBATCHES)]
    for microbatch, x in enumerate(inputs):
        whole(x).sum().backward()
        with STORE.collecting(Owner(0, microbatch)):
            cut(x).sum().backward()
    for microbatch in range(MICROBATCHES):
        STORE.run(Owner(0, microbatch))
    assert torch.equal(cut.weight.grad, whole.weight.grad)
    assert torch.equal(cut.bias.grad, whole.bias.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apex_accumulates(dtype: torch.dtype) -> None:
    """Apex's kernel adds into main_grad what a separate product would."""
    kernels = pytest.importorskip("fused_weight_gradient_mlp_cuda", reason="apex's kernels are not installed")
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(TOKENS, OUT, device="cuda", dtype=torch.bfloat16)
    main_grad = torch.ones(OUT, WIDTH, device="cuda", dtype=dtype)
    add = kernels.wgrad_gemm_accum_fp32 if dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
    add(x, gradient, main_grad)
    expected = 1 + gradient.float().t() @ x.float()
    # Sums over tokens are kept in fp32; a product may be cut into four, each of them rounded to ``dtype``.
    largest = expected.abs().max().item()
    allowed = rounding.relative(TOKENS) + 4 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(main_grad.float(), expected, rtol=0, atol=largest * allowed)
