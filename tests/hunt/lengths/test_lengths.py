"""Random loops with microbatches of unlike length; ``python -m tests.hunt.lengths`` draws more of them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.wide
def test_random_loops_train_as_under_stock() -> None:
    """In a process of their own, in which Megatron is as it comes."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hunt.lengths", "--cases", "6"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
