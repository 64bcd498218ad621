"""Loops take the same decisions compiled and as Python, whose whole numbers of numpy wrap round alike."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v, wave

INPUTS = ((3, 5, v(3), (10, 11, 7, 1), 5.0), (2, 3, wave(2, 4), (1, 1.1, 0.7, 0.05), 6.0))


def digests() -> list[str]:
    """Return what a short search finds."""
    found = []
    for ranks, microbatches, placement, (f, i, w, hop), limit in INPUTS:
        costs = Costs.uniform(placement, forward=f, input_gradient=i, weight_gradient=w, hop=hop)
        compiled = compile_schedule(ranks, microbatches, costs, limit, placements=[placement], trials=1)
        assert compiled.lower_bound < compiled.timeline.makespan, "the whole search has to run"
        found.append(compiled.timeline.schedule.digest)
    return found


def test_compiled_and_interpreted_loops_find_the_same(tmp_path, monkeypatch):
    root = str(Path(__file__).parents[2])
    script = "from tests.compiler.test_interpreted_loops import digests; print(*digests())"
    environment = os.environ | {
        "MEGATRON_PP_EXT_CACHE": str(tmp_path / "interpreted"),
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONPATH": root,
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "compiled"))
    assert run.stdout.split() == digests()
