"""The packages of frameworks on megatron.core, on a machine without a GPU and without most of what they need.

`make test-frameworks` installs them; elsewhere their tests are skipped.
"""

import importlib.util

import pytest
import torch

from tests.support import absent_packages, training  # noqa: F401  (Megatron, before the stand-ins are there)

# isort: split
import megatron.core.extensions.transformer_engine as engine
import megatron.core.models.hybrid.hybrid_model  # noqa: F401

_ENGINE_LAYERS = (
    "TEFusedMLP",
    "TEGroupedLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)
"""Layers that megatron.core defines where Transformer Engine is installed, and has no name for elsewhere."""


def require(package: str) -> None:
    """Skip the tests of the module that calls this, unless ``package`` is installed; else let it be imported."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks", allow_module_level=True)
    absent_packages.put_in_place()


def name_engine_layers() -> None:
    """Give megatron.core an empty class for each layer of Transformer Engine: a package may patch them."""
    missing = [name for name, value in vars(engine).items() if value is None and name.startswith("TE")]
    for name in (*missing, *_ENGINE_LAYERS):
        if getattr(engine, name, None) is None:
            setattr(engine, name, absent_packages.empty_class(name, torch.nn.Module))
