"""Single layers and single ranks on a GPU: the cost of a split backward, copies, and ``one_rank``.

python -m benchmarks.gpu.layers split plain [--dry]
python -m benchmarks.gpu.layers copies products [--dry]
python -m benchmarks.gpu.layers gaps v-half [--dry]
python -m benchmarks.gpu.layers away v-half [--dry]
python -m benchmarks.gpu.layers prefix 4096 [--dry]
"""

import json
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu import prefix as prefixes
from benchmarks.gpu.one_rank import TOKENS, WIDE, Block, away, gaps
from benchmarks.gpu.prefix import prefix
from benchmarks.measuring import in_turns
from megatron_pp_ext.calibration.measure import HOST_BYTES, copies_both_ways
from megatron_pp_ext.runtime.split import STORE, Owner
from tests.support.split_linear import SplitLinear

HIDDEN = 4096
REPEATS = 20
REPEATED = 8
"""Products in a row, which take less time than the copies beside them."""

GOAL = 1.02


class EngineBlock(torch.nn.Module):
    """A ``Block`` of Transformer Engine's layers, which add weight gradients into main_grad."""

    def __init__(self, hidden: int, splits: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as engine

        from megatron_pp_ext.megatron.core.engine_linear import split_backwards

        about: dict[str, Any] = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
        self.up = engine.LayerNormLinear(hidden, 4 * hidden, **about)
        self.down = engine.Linear(4 * hidden, hidden, **about)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        if splits:
            split_backwards([self])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens, hidden] to the same shape."""
        return input + self.down(torch.nn.functional.gelu(self.up(input)))


def whole(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run autograd's backward."""
    torch.autograd.backward(output, grad_tensors=gradient)


def in_halves(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run I, then W."""
    slot = Owner(0, 0)
    with STORE.collecting(slot):
        whole(output, gradient)
    STORE.run(slot)


def split(kind: str, hidden: int) -> dict[str, object]:
    """Return the cost of I and W one after the other, against a whole backward."""
    makers: dict[str, Callable[[bool], torch.nn.Module]] = {
        "plain": lambda splits: Block(hidden, SplitLinear if splits else torch.nn.Linear),
        "transformer-engine": partial(EngineBlock, hidden),
    }
    if kind == "transformer-engine" and find_spec("transformer_engine") is None:
        return {"goal": "not installed"}
    x = torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones_like(x)
    ways = {}
    for splits, backward in ((False, whole), (True, in_halves)):
        module = makers[kind](splits).to(device="cuda", dtype=torch.bfloat16)
        ways[splits] = partial(_seconds, module, x, partial(backward, gradient=gradient))
    times = in_turns(ways, rounds=REPEATS, warm_up=1)
    (base, least_base), (cut, least) = ((median(seconds), min(seconds)) for seconds in times.values())
    return {
        "hidden, tokens": hidden,
        "whole ms": f"{1e3 * base:.3f}",
        "I + W ms": f"{1e3 * cut:.3f}",
        "median ratio": f"{cut / base:.4f}",
        "least ratio": f"{least / least_base:.4f}",
        "goal": "met" if cut / base <= GOAL else f"not met: {GOAL}",
    }


def _seconds(module: torch.nn.Module, input: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> float:
    """Return the seconds of ``backward`` on the device, after a forward and without earlier gradients."""
    output = module(input)
    for tensor in (input, *module.parameters()):
        tensor.grad = None
    torch.cuda.synchronize()
    start = time.perf_counter()
    backward(output)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copies(kind: str, hidden: int) -> dict[str, object]:
    """Return the time of products during copies to the host and back, against their time alone.

    The copies go on all the time, as they would where every activation is offloaded.
    """
    if kind == "products":
        a, b = (torch.randn(hidden, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def work() -> object:
            return torch.mm(a, b)
    else:
        numbers = torch.randn(hidden, 4 * hidden, device="cuda", dtype=torch.bfloat16)

        def work() -> object:
            return torch.nn.functional.gelu(numbers)

    start = copies_both_ways(HOST_BYTES if hidden == HIDDEN else hidden, torch.device("cuda"))

    def seconds(beside: bool) -> float:
        torch.cuda.synchronize()
        if beside:
            start()
        before = time.perf_counter()
        for _ in range(REPEATED):
            work()
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - before

    ways: dict[bool, Callable[[], float]] = {beside: partial(seconds, beside) for beside in (False, True)}
    without, beside = (
        median(seconds_of_way) for seconds_of_way in in_turns(ways, rounds=REPEATS, warm_up=2).values()
    )
    return {
        "hidden, tokens": hidden,
        "alone ms": f"{1e3 * without / REPEATED:.4f}",
        "beside copies ms": f"{1e3 * beside / REPEATED:.4f}",
        "ratio": f"{beside / without:.4f}",
    }


def _prefix(name: str, dry: bool) -> dict[str, object]:
    if dry:
        return prefix(str(int(name) // 64), prefixes.LENGTH // 64, 2, 8, prefixes.masked, "cpu")
    if find_spec("transformer_engine") is None:
        return {"goal": "not installed"}
    sizes = prefixes.LENGTH, prefixes.HEADS, prefixes.WIDTH
    return prefix(name, *sizes, prefixes.of_engine(*sizes[1:]), "cuda")


def main(
    what: Annotated[str, typer.Argument(help="split, copies, gaps, away or prefix.")],
    name: Annotated[str, typer.Argument(help="The kind of layers, the schedule, or the tokens of a slice.")],
    dry: Annotated[bool, typer.Option("--dry", help="Small, on CPUs that stand in for a GPU.")] = False,
) -> None:
    """Print one row as JSON."""
    hidden, kernels, wide = HIDDEN, torch.autograd.DeviceType.CUDA, (WIDE, TOKENS)
    if dry:
        from megatron_pp_ext import cpu

        cpu.install()
        hidden, kernels, wide = 64, torch.autograd.DeviceType.CPU, (64, 16)
    ways: dict[str, Callable[[str], dict[str, object]]] = {
        "split": partial(split, hidden=hidden),
        "copies": partial(copies, hidden=hidden),
        "gaps": partial(gaps, hidden=hidden, kernels=kernels),
        "away": partial(away, hidden=wide[0], tokens=wide[1]),
        "prefix": partial(_prefix, dry=dry),
    }
    print(json.dumps(ways[what](name)))


if __name__ == "__main__":
    typer.run(main)
