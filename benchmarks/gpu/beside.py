"""A layer's I, W and B, and an I beside which products of an earlier microbatch's W run.

torchrun --nproc-per-node 2 -m benchmarks.gpu.beside [--backend nccl] [--dry]

With one rank nothing travels, so that no W lends anything.  Several ranks share the device: they are
tensor-parallel with sequence parallelism, and their messages cost what they cost on one device.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.measuring import in_turns
from megatron_pp_ext.megatron.core.engine_linear import split_backwards
from megatron_pp_ext.runtime.split import STORE, Owner

HIDDEN, TOKENS, ROUNDS = 4096, 4096, 20
BEFORE, NOW = Owner(0, 0), Owner(0, 1)


class Layer(torch.nn.Module):
    """The products of a transformer's layer, without attention, by Transformer Engine."""

    def __init__(self, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        import transformer_engine.pytorch as engine

        options: dict[str, Any] = {
            "params_dtype": torch.bfloat16,
            "fuse_wgrad_accumulation": True,
            "bias": False,
            "tp_group": group,
            "tp_size": group.size(),
            "sequence_parallel": group.size() > 1,
        }
        column, row = {**options, "parallel_mode": "column"}, {**options, "parallel_mode": "row"}
        self.qkv = engine.LayerNormLinear(hidden, 3 * hidden, **column)
        self.proj = engine.Linear(hidden, hidden, **row)
        self.fc1 = engine.LayerNormLinear(hidden, 4 * hidden, **column)
        self.fc2 = engine.Linear(4 * hidden, hidden, **row)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        split_backwards([self])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` [tokens of the rank, hidden] to the same shape."""
        query, *_ = self.qkv(input).chunk(3, -1)
        input = input + self.proj(query)
        return input + self.fc2(torch.nn.functional.gelu(self.fc1(input)))


def milliseconds(layer: Layer, input: torch.Tensor) -> Mapping[str, Callable[[], float]]:
    """Return a function for each way that measures it on the device, in milliseconds, after its forwards."""

    def timed(*steps: Callable[[torch.Tensor], None], of: int = -1) -> float:
        """Time step ``of`` of the steps that follow two forwards."""
        outputs = [layer(input) for _ in range(2)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number, step in enumerate(steps):
            is_timed = number == of % len(steps)
            if is_timed:
                dist.barrier()
                start.record()
            step(outputs[min(number, 1)])
            if is_timed:
                end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    def backward(output: torch.Tensor) -> None:
        torch.autograd.backward(output, grad_tensors=torch.ones_like(output))

    def in_half(slot: Owner, output: torch.Tensor) -> None:
        with STORE.collecting(slot):
            backward(output)

    def beside(output: torch.Tensor) -> None:
        with STORE.beside(BEFORE):
            in_half(NOW, output)

    def run(slot: Owner, output: torch.Tensor) -> None:
        STORE.run(slot)

    first, second = partial(in_half, BEFORE), partial(in_half, NOW)
    w, last = partial(run, BEFORE), partial(run, NOW)
    return {
        "B": partial(timed, backward, backward),
        "I": partial(timed, first, second, w, last, of=1),
        "W": partial(timed, first, second, w, last, of=2),
        "I beside a W": partial(timed, first, beside, w, last, of=1),
        "the rest of that W": partial(timed, first, beside, w, last, of=2),
    }


def main(
    backend: Annotated[str, typer.Option(help="What carries the ranks' messages.")] = "gloo",
    dry: Annotated[bool, typer.Option("--dry", help="Only say what would be measured.")] = False,
) -> None:
    """Print one row as JSON, on the first rank."""
    if dry or find_spec("transformer_engine") is None:
        print(json.dumps({"goal": "not run" if dry else "not installed"}))
        return
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    ranks = dist.get_world_size()
    assert dist.group.WORLD is not None
    layer = Layer(HIDDEN, dist.group.WORLD)
    input = torch.randn(TOKENS // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = in_turns(dict(milliseconds(layer, input)), rounds=ROUNDS, warm_up=2)
    medians = {way: median(milliseconds_of_way) for way, milliseconds_of_way in times.items()}
    cells = {f"{way} ms": f"{milliseconds_of_way:.3f}" for way, milliseconds_of_way in medians.items()}
    separate, combined = medians["I"] + medians["W"], medians["I beside a W"] + medians["the rest of that W"]
    ratios = {"I + W over B": separate / medians["B"], "beside over B": combined / medians["B"]}
    if dist.get_rank() == 0:
        print(json.dumps({**cells, **{name: f"{ratio:.4f}" for name, ratio in ratios.items()}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
