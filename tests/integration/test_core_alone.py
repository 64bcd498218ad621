"""integration/core works for a trainer that is not Megatron's own."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
from megatron_pp_ext import cpu

cpu.install()

class NoTrainer:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["megatron", "training"]:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, NoTrainer())
from megatron_pp_ext.integration import core

for module in pkgutil.iter_modules(core.__path__, f"{core.__name__}."):
    importlib.import_module(module.name)
"""


def test_the_core_is_imported_where_there_is_no_trainer() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
