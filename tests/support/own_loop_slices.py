"""What ``tests/features/units/megatron/test_install.py`` compares, written to the file that it is given.

All of it runs in a process of its own, in which Megatron is as it comes.
"""

import pickle
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch

import megatron_pp_ext
from megatron_pp_ext.features.units import costs as choice
from megatron_pp_ext.features.units import runtime as prefixes
from megatron_pp_ext.megatron.core.parameters import global_parameters
from tests.support import own_loop


def on_rank(rank: int) -> dict[str, Any]:
    """Return this rank's results."""
    own_loop.start()
    results: dict[str, Any] = {}
    model = own_loop.build(1)
    results["stock"] = own_loop.train(model, own_loop.COUNTS)
    results["stock data"] = _data(model)
    results["stock wrappers"] = _evaluated(model)
    results["stock returns"] = {kind: _trained_by(kind, 1) for kind in RETURNS}
    results["chosen"], results["line"] = _chosen()
    megatron_pp_ext.install("v-half", ranks=2, microbatches=8, slice_tokens=2)
    results["returns"] = {kind: _trained_by(kind, 2) for kind in RETURNS}
    model = own_loop.build(2)
    results["sliced"] = own_loop.train(model, own_loop.COUNTS)
    results["data"] = _data(model)
    results["wrappers"] = [_evaluated(chunks) for chunks in (model, [part.module for part in model], model)]
    results["keys"] = _keys_in_evaluation(model)
    results["length"] = _error(model, seq_length=4)
    step = own_loop.forward_step

    def changed(*args: Any) -> Any:
        output, loss = step(*args)
        return 2 * output, loss

    if rank == 1:  # it has the first stage, and fails before its first message
        results["changed"] = _error(model, forward_step=changed)
    return results


RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the loss itself": lambda loss: (loss, {"lm loss": loss}),
    "a view of it": lambda loss: (loss, {"loss": loss.view(1)}),
    "detached": lambda loss: (loss, {"loss": loss.detach()}),
    "a number": lambda loss: (loss, {"loss": loss.item()}),
    "a tuple": lambda loss: (loss, (loss, loss.detach().clone())),
    "no more": lambda loss: [loss, loss],
    "a sum and its tokens": lambda loss: (loss, torch.tensor(3), {"loss": loss.detach()}),
    "a sum itself": lambda loss: (loss, torch.tensor(3), loss),
}
"""What a loss function may return beside the loss, which stock's schedule divides in place; the first is that
of Megatron's example loop."""


def _trained_by(kind: str, chunks: int) -> own_loop.Record:
    """Return the results of a step, and of an evaluation, whose loss function returns this ``kind``.

    It writes to the model's output, too.
    """

    def step(iterator: Any, model: Any) -> Any:
        output, _ = own_loop.forward_step(iterator, model)
        return output, lambda losses: RETURNS[kind](losses.mul_(2.0).mean())

    model, record = own_loop.build(chunks), own_loop.Record()
    iterators = [own_loop.batches() for _ in model]
    for forward_only in (False, True):
        returned = own_loop.run_step(model, iterators, 3, forward_step_func=step, forward_only=forward_only)
        record.losses.append([number for one in returned for number in _numbers(one)])
    for name, parameter in global_parameters(model):
        record.gradients[name] = parameter.main_grad.clone()
    return record


def _numbers(returned: Any) -> list[float]:
    """Return the numbers in what a loss function returns beside the loss."""
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    parts = returned if isinstance(returned, tuple) else (returned,)
    return [float(part) for part in parts]


def _keys_in_evaluation(model: list[Any]) -> int:
    """Return the most storages of keys and of values that there are at once in an evaluation."""
    alive: WeakSet[Any] = WeakSet()
    most = 0

    class Counted(prefixes.Prefix):
        def __init__(self, *about: Any) -> None:
            nonlocal most
            super().__init__(*about)
            alive.add(self)
            most = max(most, len(alive))

    stock, prefixes.Prefix = prefixes.Prefix, Counted
    try:
        _evaluated(model)
    finally:
        prefixes.Prefix = stock
    return most


def _evaluated(model: list[Any]) -> list[float]:
    """Return the losses of an evaluation."""
    losses = own_loop.run_step(model, [own_loop.batches() for _ in model], 3, forward_only=True)
    return [float(entry["loss"]) for entry in losses]


def _chosen() -> tuple[Any, str]:
    """Return the results of a model whose slices are chosen, here as 4 tokens, and the printed lines."""
    choice.chosen = lambda *about: 4
    with redirect_stdout(StringIO()) as printed:
        megatron_pp_ext.install("v-half", ranks=2, microbatches=8, slice_tokens="auto")
        return own_loop.train(own_loop.build(2), own_loop.COUNTS), printed.getvalue()


def _data(model: list[Any]) -> list[Any]:
    iterators = [own_loop.batches() for _ in model]
    return own_loop.run_step(model, iterators, 3, forward_only=True, collect_non_loss_data=True)


def _error(model: list[Any], forward_step: Any = own_loop.forward_step, **about: Any) -> str:
    """Return the error of a step that fails before any message."""
    own_loop.forward_step = forward_step
    try:
        own_loop.run_step(model, [own_loop.batches() for _ in model], 3, **about)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run_ranks(on_rank, 2)))
