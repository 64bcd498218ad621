"""What it costs to cut a backward in two: I and W one after the other against one whole backward.

    python benchmarks/split.py

A stack of blocks (norm, linear h to 4h, GELU, linear back, residual) is differentiated whole by autograd;
in halves by this project's linear layers, which leave their weight's gradient for later (``runtime.split``);
and in halves by torch.distributed.pipelining, which walks the autograd graph.  All on one thread and in
turns, so that a slow moment of the machine meets all of them.  Writes results/split.md.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.progress import track
from tables import table
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.split import STORE, SplitLinear

RESULTS = Path(__file__).parent / "results"
HIDDEN, DEPTHS = (128, 256, 512, 1024), (1, 4, 8)
TOKENS = 128
GOALS = {128: 1.1, 256: 1.1, 512: 1.02, 1024: 1.02}

Linear = type[torch.nn.Linear]


class Block(torch.nn.Module):
    """A transformer layer's feed-forward."""

    def __init__(self, hidden: int, linear: Linear) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same."""
        return input + self.down(torch.nn.functional.gelu(self.up(self.norm(input))))


class Stage:
    """A stack of blocks with an input and the gradient of its output."""

    def __init__(self, hidden: int, depth: int, linear: Linear) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(*(Block(hidden, linear) for _ in range(depth)))
        self.input = torch.randn(TOKENS, hidden, requires_grad=True)
        self.gradient = torch.randn(TOKENS, hidden)

    def seconds(self, backward: Callable[["Stage", torch.Tensor], None]) -> float:
        """What ``backward`` takes of the processor after a forward; gradients add to what is there."""
        output = self.module(self.input)
        self.input.grad = None
        start = time.process_time()
        backward(self, output)
        return time.process_time() - start


def whole(stage: Stage, output: torch.Tensor) -> None:
    """Autograd's backward."""
    torch.autograd.backward(output, grad_tensors=stage.gradient)


def ours(stage: Stage, output: torch.Tensor) -> None:
    """I, then W."""
    slot = Owner(0, 0)
    with STORE.collecting(slot):
        whole(stage, output)
    STORE.run(slot)


def torchs(stage: Stage, output: torch.Tensor) -> None:
    """The same by torch.distributed.pipelining."""
    weights = list(stage.module.parameters())
    _, groups = stage_backward_input([output], [stage.gradient], [stage.input], iter(weights))
    stage_backward_weight(iter(weights), groups)


WAYS = {
    "whole": (torch.nn.Linear, whole),
    "ours, uncut": (SplitLinear, whole),
    "ours": (SplitLinear, ours),
    "torch": (torch.nn.Linear, torchs),
}


def measure(hidden: int, depth: int, seconds: float) -> dict[str, list[float]]:
    """The seconds of every way, measured in turns for ``seconds``; gradients must be the same numbers."""
    stages = {name: Stage(hidden, depth, linear) for name, (linear, _) in WAYS.items()}
    for name, (_, backward) in WAYS.items():
        stages[name].seconds(backward)
    expected = [p.grad for p in stages["whole"].module.parameters()]
    for name, stage in stages.items():
        for found, wanted in zip(stage.module.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted, msg=f"gradients of {name}")
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    gc.disable()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["whole"]) < 5:
        for name, (_, backward) in WAYS.items():
            times[name].append(stages[name].seconds(backward))
    gc.enable()
    return times


def main(
    seconds: Annotated[float, typer.Option(help="How long to measure each size.")] = 8.0,
) -> None:
    """Measure every size and write the results."""
    torch.set_num_threads(1)
    sizes = [(hidden, depth) for hidden in HIDDEN for depth in DEPTHS]
    rows = []
    for hidden, depth in track(sizes, "measuring"):
        times = measure(hidden, depth, seconds)
        typical, least = ({name: of(found) for name, found in times.items()} for of in (median, min))
        ratio = typical["ours"] / typical["whole"]
        goal = GOALS[hidden]
        rows.append(
            [
                hidden,
                depth,
                f"{1e3 * typical['whole']:.3f}",
                *(
                    f"{typical[name] / typical['whole']:.3f} ({least[name] / least['whole']:.3f})"
                    for name in WAYS
                    if name != "whole"
                ),
                f"{goal:g} {'met' if ratio <= goal else '**missed**'}",
                len(times["whole"]),
            ]
        )
    head = [
        "hidden",
        "layers",
        "whole, ms",
        "our linear, uncut",
        "our I + W",
        "torch's I + W",
        "goal",
        "rounds",
    ]
    lines = [
        "# A backward in two halves against a whole one",
        "",
        f"`python benchmarks/split.py --seconds {seconds:g}` on {platform.machine()}, {os.cpu_count()} cores,"
        f" one thread, torch {torch.__version__}, {date.today()}.",
        "",
        f"Blocks of norm, linear, GELU, linear and residual on {TOKENS} tokens, fp32. Ratios of medians to "
        "that of autograd's whole backward, of minima in brackets; seconds are the processor's, and the "
        "ways alternate within a round.",
        "",
        table(head, rows),
    ]
    (RESULTS / "split.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
