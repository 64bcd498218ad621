"""What does it cost to split a backward: I and W one after the other, against one whole backward?

    python -m benchmarks.runtime.split

A stack of blocks (norm, linear h to 4h, GELU, linear back, residual) is differentiated whole by autograd;
split by this project's linear layers, which defer their weight gradients (``runtime.split``); and split by
torch.distributed.pipelining, which walks the autograd graph.  All run on one thread and in turns.  Writes
results/split.md.  ``gpu/layers.py`` measures the same blocks on a GPU.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, NamedTuple

import torch
import typer
from rich.progress import track
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.measuring import in_turns
from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.runtime.activation_meter import Owner
from megatron_pp_ext.runtime.split import STORE
from tests.support.split_linear import SplitLinear

DEPTHS, TOKENS = (1, 4, 8), 128
GOALS = {128: 1.1, 256: 1.1, 512: 1.02, 1024: 1.02}
"""By hidden size: the largest ratio of I + W to a whole backward that is aimed at."""


class Block(torch.nn.Module):
    """The feed-forward part of a transformer layer."""

    def __init__(self, hidden: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same shape."""
        return input + self.down(torch.nn.functional.gelu(self.up(self.norm(input))))


class Stage(NamedTuple):
    """A module with its input [tokens, hidden] and the gradient of its output."""

    module: torch.nn.Module
    input: torch.Tensor
    gradient: torch.Tensor


Backward = Callable[[Stage, torch.Tensor], None]


def whole(stage: Stage, output: torch.Tensor) -> None:
    """Run autograd's backward."""
    torch.autograd.backward(output, grad_tensors=stage.gradient)


def ours(stage: Stage, output: torch.Tensor) -> None:
    """Run I, then W."""
    slot = Owner(0, 0)
    with STORE.collecting(slot):
        whole(stage, output)
    STORE.run(slot)


def torchs(stage: Stage, output: torch.Tensor) -> None:
    """Run I, then W, of torch.distributed.pipelining."""
    weights = list(stage.module.parameters())
    _, groups = stage_backward_input([output], [stage.gradient], [stage.input], iter(weights))
    stage_backward_weight(iter(weights), groups)


WAYS: dict[str, tuple[type[torch.nn.Linear], Backward]] = {
    "whole": (torch.nn.Linear, whole),
    "ours, uncut": (SplitLinear, whole),
    "ours": (SplitLinear, ours),
    "torch": (torch.nn.Linear, torchs),
}


def stack(hidden: int, depth: int, linear: type[torch.nn.Linear]) -> Stage:
    """Make a stack of blocks, always with the same numbers."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(Block(hidden, linear) for _ in range(depth)))
    return Stage(module, torch.randn(TOKENS, hidden, requires_grad=True), torch.randn(TOKENS, hidden))


def processor_seconds(stage: Stage, backward: Backward) -> float:
    """Return the processor time of ``backward`` after a forward; gradients are added to what is there."""
    output = stage.module(stage.input)
    stage.input.grad = None
    start = time.process_time()
    backward(stage, output)
    return time.process_time() - start


def measure(hidden: int, depth: int, seconds: float) -> dict[str, list[float]]:
    """Measure all ways in turns for ``seconds``; all must compute the same gradients."""
    stages = {name: stack(hidden, depth, linear) for name, (linear, _) in WAYS.items()}
    ways = {name: partial(processor_seconds, stages[name], way) for name, (_, way) in WAYS.items()}
    in_turns(ways, rounds=1)
    expected = [p.grad for p in stages["whole"].module.parameters()]
    for name, stage in stages.items():
        for found, wanted in zip(stage.module.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted, msg=f"gradients of {name}")
    gc.disable()
    times = in_turns(ways, rounds=5, seconds=seconds)
    gc.enable()
    return times


def main(
    out: Out = RESULTS / "split.md",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each size for.")] = 8.0,
) -> None:
    """Measure every size and write the table."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for hidden, depth in track([(hidden, depth) for hidden in GOALS for depth in DEPTHS], "measuring"):
        times = measure(hidden, depth, seconds)
        typical, least = ({name: of(found) for name, found in times.items()} for of in (median, min))
        ratios = (
            f"{typical[name] / typical['whole']:.3f} ({least[name] / least['whole']:.3f})"
            for name in list(WAYS)[1:]
        )
        met = "met" if typical["ours"] / typical["whole"] <= GOALS[hidden] else "**missed**"
        goal = f"{GOALS[hidden]:g} {met}"
        rows.append((hidden, depth, f"{1e3 * typical['whole']:.3f}", *ratios, goal, len(times["whole"])))
    head = (
        "hidden", "layers", "whole, ms", "our linear, uncut", "our I + W", "torch's I + W", "goal", "rounds",
    )  # fmt: skip
    about = (
        f"One thread, torch {torch.__version__}. Blocks of norm, linear, GELU, linear and residual on "
        f"{TOKENS} tokens, fp32. Ratios are of medians to that of autograd's whole backward, of minima in "
        "brackets; seconds are the processor's, and the ways take turns."
    )
    publish(out, "A backward in two halves against a whole one", about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
