"""What the benchmark's parts share: costs, Markdown tables, verdicts."""

import time
from collections.abc import Sequence
from pathlib import Path

from megatron_pp_ext.compiler.compile import TRIALS, Compiled, compile_schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement

Times = tuple[float, float, float, float]
UNIT: Times = (1, 1, 1, 0)
UNEQUAL: Times = (10, 11, 7, 1)

FEWER_TRIALS = 300
"""Fewer than the default, where there are some hundred points."""

Row = Sequence[object]


def costs_of(placement: Placement, times: Times) -> Costs:
    """The same ``times`` (F, I, W, hop) for every stage of ``placement``."""
    forward, i, w, hop = times
    return Costs.uniform(placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)


def publish(lines: Sequence[str], file: Path | None) -> None:
    """Write a result's ``lines`` to ``file``, or print them without one."""
    text = "\n".join(lines) + "\n"
    if file is None:
        print(text, end="")
    else:
        file.write_text(text)


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def verdict(found: float, goal: float) -> str:
    """How a makespan compares with the one to reach."""
    if found < goal * (1 - 1e-9):
        return f"{100 * (1 - found / goal):.1f}% shorter"
    return "met" if found <= goal * (1 + 1e-9) else f"**{100 * (found / goal - 1):.1f}% longer**"


def timed(p: int, m: int, costs: Costs, limit: float, trials: int = TRIALS) -> tuple[Compiled, float]:
    """A compilation and the seconds of processor time it took."""
    start = time.process_time()
    compiled = compile_schedule(p, m, costs, limit, trials=trials)
    return compiled, time.process_time() - start
