"""The command answers at once: it must not import what takes seconds."""

import subprocess
import sys


def test_no_heavy_imports():
    modules = "cli", "cli.flex", "compiler.compile", "schedule.formats.costs_file"
    code = "import sys, " + ", ".join(f"megatron_pp_ext.{module}" for module in modules)
    code += "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "megatron", "numpy", "numba", "pydantic"} & set(loaded.stdout.split())
