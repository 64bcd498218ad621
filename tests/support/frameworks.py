"""The packages of frameworks on megatron.core, on a machine without a GPU and without most of what they need.

`make test-frameworks` installs them; elsewhere their tests are skipped.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import absent_packages, training  # noqa: F401  (Megatron, before the stand-ins are there)

# isort: split
import megatron.core.extensions.transformer_engine as engine
import megatron.core.models.hybrid.hybrid_model  # noqa: F401

from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner

_ENGINE_LAYERS = (
    "TEFusedMLP",
    "TEGroupedLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)
"""Layers that megatron.core defines where Transformer Engine is installed, and has no name for elsewhere."""


def require(package: str) -> None:
    """Let ``package`` be imported; where it is not installed, skip the tests of the calling module."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks", allow_module_level=True)
    absent_packages.put_in_place()


def require_checkout(variable: str, package: str, *absent: str) -> None:
    """Let ``package`` be imported from the checkout that ``variable`` names; skip the tests without one.

    No registry has these frameworks.  The ``absent`` packages, which they import and the tests do not need,
    have stand-ins.
    """
    folder = os.environ.get(variable, "")
    if not Path(folder, package, "__init__.py").exists():
        pytest.skip(f"{variable} does not name a checkout of {package}", allow_module_level=True)
    for name in ("transformers", "megatron.bridge"):
        require(name)
    sys.path.append(folder)
    absent_packages.PACKAGES.update(
        dict.fromkeys(absent, f"what {package} imports and its workers here do not use")
    )


def name_engine_layers() -> None:
    """Give megatron.core empty classes for Transformer Engine's layers, for a package that patches them."""
    missing = [name for name, value in vars(engine).items() if value is None and name.startswith("TE")]
    for name in (*missing, *_ENGINE_LAYERS):
        if getattr(engine, name, None) is None:
            setattr(engine, name, absent_packages.empty_class(name, torch.nn.Module))


@contextmanager
def counting_steps() -> Iterator[list[int]]:
    """Yield a list that gets the number of microbatches of each step that this package runs, not stock."""
    counts: list[int] = []
    run = PipelineRunner.__call__

    def counting(runner: PipelineRunner, *args: Any, **kwargs: Any) -> Any:
        counts.append(kwargs["num_microbatches"])
        return run(runner, *args, **kwargs)

    with mock.patch.object(PipelineRunner, "__call__", counting):
        yield counts
