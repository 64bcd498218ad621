"""Transformer Engine's own Python from a checkout, on a CPU: its compiled parts are stood in for.

What is stood in for is the extension ``transformer_engine_torch``, and apex's one kernel that Megatron's
local layers fuse with: matrix products and norms by plain torch (see ``kernels``), all else by names that can
be imported and not called.  Modules, autograd functions and their order are Transformer Engine's.
"""

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.support import engine_kernels

NAME = "TRANSFORMER_ENGINE"
"""The environment variable with the folder of a checkout."""


class _Named(type):
    """A class whose unknown attributes are numbers, like an enumeration's."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return int(getattr(cls, name))

    @property
    def __members__(cls) -> dict[str, int]:
        """The arguments that were asked for: Transformer Engine 2.18 compares them with its own."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, int)}


class _Anything(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return _absent(f"{self.__name__}.{name}")
        attribute = _Named(name, (), {})
        setattr(self, name, attribute)
        return attribute


def _absent(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} has no stand-in on a CPU")

    return call


def _version(checkout: Path) -> str:
    """Return the version of a checkout, or of a wheel that was unpacked there."""
    for metadata in checkout.glob("transformer_engine-*.dist-info"):
        return metadata.name.removesuffix(".dist-info").partition("-")[2]
    return (checkout / "build_tools" / "VERSION.txt").read_text().strip()


def install(checkout: Path) -> None:
    """Let ``import transformer_engine`` find the Python of ``checkout``; before Megatron is imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # nothing compiled is loaded then
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.get_device_capability = lambda *device: (9, 0)  # asked for by --moe-grouped-gemm
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(checkout / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    package.__version__ = _version(checkout)
    extension = _Anything("transformer_engine_torch")
    for name in engine_kernels.TRANSFORMER_ENGINE:
        setattr(extension, name, getattr(engine_kernels, name))
    sys.modules |= {
        "transformer_engine_torch": extension,
        "transformer_engine": package,
        "transformer_engine.pytorch.onnx_extensions": _Anything("onnx_extensions"),
        "einops": _Anything("einops"),
        "fused_weight_gradient_mlp_cuda": engine_kernels,
    }
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda name: None
    import transformer_engine.pytorch

    # Its optimizers are kernels through and through; Megatron has others where these cannot be imported.
    sys.modules["transformer_engine.pytorch.optimizers"] = None
    package.common, package.pytorch = transformer_engine.common, transformer_engine.pytorch
    _attend_locally()


def install_named() -> bool:
    """Install the checkout that TRANSFORMER_ENGINE names, if it does, with a stub of graphs; return whether.

    Before Megatron is imported, in a process of its own: Megatron binds Transformer Engine, or its absence.
    """
    from tests.support import graph_stub

    if NAME not in os.environ or "megatron.core" in sys.modules:
        return False
    graph_stub.install()
    install(Path(os.environ[NAME]))
    return True


def is_installed() -> bool:
    """Whether Transformer Engine in this process is that of a checkout."""
    return isinstance(sys.modules.get("transformer_engine_torch"), _Anything)


def _attend_locally() -> None:
    """Attention has no weights: Megatron's own does as well, and needs no kernel.

    As Transformer Engine's it masks what comes later by itself, and looks at no mask that it is given.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from tests.support.attention_layers import Core

    class Causal(Core):
        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **more: Any
        ) -> Any:
            return super().forward(query, key, value, None, *args, **more)

    TESpecProvider.core_attention = lambda provider: Causal
