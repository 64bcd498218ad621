"""Runs a program of ``tests.support`` in a process of its own, and reads the results of its ranks."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def found(program: str, folder: Path, *words: str) -> list[dict[Any, Any]]:
    """Return what each rank of ``tests.support.PROGRAM`` writes to a file in ``folder``, its first word.

    MEGATRON_LM may name a checkout to run on.
    """
    file = folder / "found.pickle"
    folders = filter(None, (os.environ.get("MEGATRON_LM"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", f"tests.support.{program}", str(file), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    ranks: list[dict[Any, Any]] = pickle.loads(file.read_bytes())
    return ranks
