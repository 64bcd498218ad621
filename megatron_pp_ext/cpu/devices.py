"""Tensors that are requested on "cuda" are made on the CPU.

The functions that take a device are wrapped one by one. A ``TorchFunctionMode`` would catch them all with
less code, but it belongs to one thread and costs Python time in every torch call, which would blur what the
benchmarks measure on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# fmt: off
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "hann_window", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)
# fmt: on
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def on_cpu(device: Any) -> Any:
    """Translate a device as Megatron writes it ("cuda", "cuda:1", an index, torch.device) to the CPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return "cpu"  # a bare number is a CUDA index: what torch.cuda.current_device() returns
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return device


def _redirect_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose device is the keyword argument ``device``, and which may take ``pin_memory``."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning is a property of memory that a GPU reads
        return function(*args, **kwargs)

    return redirected


def _redirect_to(move: Callable[..., Any], first_device: int) -> Callable[..., Any]:
    """Wrap ``Tensor.to`` or ``Module.to``, whose device may come first and without a name."""

    @functools.wraps(move)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if len(args) > first_device:
            args = (*args[:first_device], on_cpu(args[first_device]), *args[first_device + 1 :])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return move(*args, **kwargs)

    return redirected


def _type_as_on_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``tensor.type()`` return "torch.cuda.FloatTensor".

    Megatron's optimizers and its gradient clipping sort parameters by that name and raise for a CPU tensor.
    """

    @functools.wraps(original)
    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_name


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``.cuda()`` and ``.pin_memory()``: the tensor is where it should be."""
    return self


def install() -> None:
    """Wrap the factories, the moves and ``Tensor.type``."""
    for name in FACTORIES:
        setattr(torch, name, _redirect_keyword(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _redirect_keyword(getattr(torch.Tensor, name)))
    replacements: dict[str, Any] = {
        "to": _redirect_to(torch.Tensor.to, first_device=1),
        "type": _type_as_on_gpu(torch.Tensor.type),
        "cuda": _stay,
        "pin_memory": _stay,
        "record_stream": lambda self, stream: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.Tensor, name, replacement)
    torch.nn.Module.to = _redirect_to(torch.nn.Module.to, first_device=1)  # type: ignore[method-assign]
    torch.load = _load_on_cpu(torch.load)


def _load_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.load``, whose device is called ``map_location``; a function there stays as it is."""

    @functools.wraps(load)
    def redirected(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, on_cpu(map_location), *args, **kwargs)

    return redirected
