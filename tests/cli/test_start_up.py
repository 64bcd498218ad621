"""The command answers at once: it must not import what takes seconds."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "megatron_pp_ext.cli",
        "megatron_pp_ext.cli.flex",
        "megatron_pp_ext.compiler.compile",
        "megatron_pp_ext.schedule.costs_file",
    ],
)
def test_no_heavy_imports(module):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "megatron", "numpy", "numba", "pydantic"} & set(loaded.stdout.split())
