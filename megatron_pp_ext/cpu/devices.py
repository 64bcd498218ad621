"""Tensors that are requested on "cuda" are made on the CPU.

The functions that take a device are wrapped one by one. A ``TorchFunctionMode`` would catch them all with
less code, but it belongs to one thread and costs Python time in every torch call, which would blur what the
benchmarks measure on a CPU.
"""

import functools
from collections.abc import Callable, Collection
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


def redirected(
    function: Callable[..., Any],
    name: str,
    translate: Callable[[Any], Any],
    at: int | None = None,
    drops: Collection[str] = (),
) -> Callable[..., Any]:
    """Wrap a function whose argument ``name``, which may also come at place ``at``, is to be translated.

    It does not get the keyword arguments that it ``drops``.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if at is not None and len(args) > at:
            args = (*args[:at], translate(args[at]), *args[at + 1 :])
        keywords = {name: value for name, value in kwargs.items() if name not in drops}
        if name in keywords:
            keywords[name] = translate(keywords[name])
        return function(*args, **keywords)

    return call


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
    for names, holder in ((FACTORIES, torch), (TENSOR_FACTORIES, torch.Tensor)):
        for name in names:
            # Pinning is a property of memory that a GPU reads.
            redirected_factory = redirected(getattr(holder, name), "device", on_cpu, drops=("pin_memory",))
            setattr(holder, name, redirected_factory)
    replacements: dict[str, Any] = {
        "to": redirected(torch.Tensor.to, "device", on_cpu, at=1),
        "type": _type_as_on_gpu(torch.Tensor.type),
        "cuda": _stay,
        "pin_memory": _stay,
        "record_stream": lambda self, stream: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.Tensor, name, replacement)
    module = torch.nn.Module
    module.to = redirected(module.to, "device", on_cpu, at=1)  # type: ignore[method-assign]
    torch.load = redirected(torch.load, "map_location", on_cpu, at=1)
