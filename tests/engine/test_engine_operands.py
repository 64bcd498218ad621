"""Transformer Engine's own quantized tensors while they wait for W: one copy of their numbers is left.

Their constructors' keywords are filled by name, since every release has others.
"""

import importlib
import inspect
import sys

import pytest
import torch

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

from megatron_pp_ext.runtime.activation_meter import plain_tensors
from tests.support.deferred import ROWS, WIDTH, put

NAMES = ("float8", "mxfp8", "float8_blockwise", "nvfp4")
SCALES = {"fp8_scale_inv", "rowwise_scale_inv", "columnwise_scale_inv", "amax_rowwise", "amax_columnwise"}


def module(name):
    """Where the storage of ``name`` tensors is defined: it moved with 2.9."""
    for place in ("storage.{}_tensor_storage", "_internal.{}_tensor_base"):
        try:
            return importlib.import_module(f"transformer_engine.pytorch.tensor.{place.format(name)}")
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("transformer_engine.pytorch.tensor"):
                raise
    pytest.skip(f"this Transformer Engine has no {name}")


def storage(name):
    """One with both copies, of ROWS x WIDTH bytes each."""
    home = module(name)
    (made,) = (
        value
        for key, value in vars(home).items()
        if inspect.isclass(value) and value.__module__ == home.__name__ and key.endswith(("Base", "Storage"))
    )
    import transformer_engine_torch as extension

    values = {}
    for keyword in inspect.signature(made.__new__).parameters:
        if keyword in ("data", "data_transpose", "rowwise_data", "columnwise_data"):
            values[keyword] = torch.zeros(ROWS, WIDTH, dtype=torch.uint8)
        elif keyword in SCALES:
            values[keyword] = torch.ones(1)
        elif keyword in ("fp8_dtype", "fp4_dtype"):
            values[keyword] = extension.DType.kFloat8E4M3
        elif keyword in ("quantizer", "data_format"):
            values[keyword] = None
        elif keyword in ("is_2D_scaled", "with_gemm_swizzled_scales"):
            values[keyword] = False
    return made(**values)


def counted_scales(operand):
    """The bytes of scales that are counted, of the release 2.20 on, which names all of its tensors."""
    data = {id(tensor) for tensor in operand.get_data_tensors()}
    return sum(tensor.nbytes for tensor in plain_tensors(operand) if id(tensor) not in data)


def is_on_blackwell(monkeypatch, answer):
    for home in list(sys.modules.values()):
        if "is_non_tn_fp8_gemm_supported" in getattr(home, "__dict__", {}):
            monkeypatch.setattr(home, "is_non_tn_fp8_gemm_supported", lambda: answer)


@pytest.mark.parametrize("name", NAMES)
def test_w_keeps_the_columnwise_copy(name, monkeypatch):
    is_on_blackwell(monkeypatch, False)
    operands = storage(name), storage(name)
    columns = [operand.get_data_tensors()[1] for operand in operands]
    if not hasattr(operands[0], "update_usage"):
        pytest.skip("this Transformer Engine's storages cannot be told which copy to drop")
    waiting, given = put(*operands)
    assert waiting == 2 * ROWS * WIDTH + sum(map(counted_scales, operands))
    for operand, column in zip(given, columns, strict=True):
        left = operand.get_data_tensors()
        assert left[0] is None and left[1] is column


def test_one_copy_for_both_uses_is_kept(monkeypatch):
    """FP8 with one scale a tensor on Blackwell: there the rowwise copy is read by columns too."""
    is_on_blackwell(monkeypatch, True)
    operands = storage("float8"), storage("float8")
    if not hasattr(operands[0], "update_usage"):
        pytest.skip("this Transformer Engine's storages cannot be told which copy to drop")
    rows = [operand.get_data_tensors()[0] for operand in operands]
    waiting, given = put(*operands)
    assert waiting == 2 * ROWS * WIDTH + sum(map(counted_scales, operands))
    assert all(operand.get_data_tensors()[0] is row for operand, row in zip(given, rows, strict=True))


def test_a_tensor_that_autograd_brought_stays_whole(monkeypatch):
    is_on_blackwell(monkeypatch, False)
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    whole, plain = storage("float8"), {"shape": (ROWS, WIDTH), "dtype": torch.bfloat16}
    data, transpose = whole.get_data_tensors()
    shared = Float8Tensor(
        **plain,
        data=data,
        data_transpose=transpose,
        fp8_scale_inv=torch.ones(1),
        fp8_dtype=whole._fp8_dtype,
        quantizer=None,
    )
    _, given = put(storage("float8"), shared)
    assert shared.get_data_tensors() == (data, transpose)
    left = given[1].get_data_tensors()
    assert left[0] is None and left[1] is transpose
