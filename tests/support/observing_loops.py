"""Loops that can observe in which order microbatches run, around the forward steps and batches of others.

Each is what real loops do: they count their calls, keep weights beside the data, fill one buffer anew, return
one tensor for all losses, communicate in a loss.  Without an order all of them train as under stock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.nn.functional import pad

from tests.support import own_loop

WEIGHTS = (0.1, 3.0, 0.5, 2.0, 1.0, 0.7)
LONGEST = 64
MULTIPLE = 4
UNPADDED = 6
"""The calls after which a loop begins to pad to a multiple of tokens: the second step of most runs."""

Step = Callable[[Any, Any], tuple[torch.Tensor, Any]]
"""A forward step."""


@dataclass(frozen=True)
class Loop:
    """Makes, for one run, a forward step of another one, and data of other batches.

    ``refused`` are words of the line in which it ends under an order; None where it may ask for one, and
    empty where it must not, which nobody can see.
    """

    step: Callable[[Step], Step] = lambda inner: inner
    data: Callable[[Iterator[Any]], Any] = lambda batches: batches
    refused: str | None = None


def _weighing(loss: Any, weight: Any) -> Any:
    def weighed(losses: torch.Tensor, *about: Any) -> Any:
        value, reported = loss(losses, *about)
        return value * weight, {name: number * weight for name, number in reported.items()}

    return weighed


def _counting(inner: Step) -> Step:
    calls: dict[int, int] = {}

    def step(iterator: Any, model: Any) -> Any:
        number = calls[id(model)] = calls.get(id(model), -1) + 1
        output, loss = inner(iterator, model)
        return output, _weighing(loss, WEIGHTS[number % len(WEIGHTS)])

    return step


def _listing(inner: Step) -> Step:
    advantages: dict[int, list[float]] = {}

    def step(iterator: Any, model: Any) -> Any:
        weights = advantages.setdefault(id(model), [])
        weights[:] = weights or WEIGHTS
        output, loss = inner(iterator, model)
        return output, _weighing(loss, weights.pop(0))

    return step


class _Staging:
    """A loader that fills one buffer for each name anew."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._buffers: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, Any]:
        return {name: self._staged(name, value) for name, value in next(self._batches).items()}

    def _staged(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        buffer = self._buffers.setdefault(name, torch.zeros(LONGEST**2, dtype=value.dtype))
        staged = buffer[: value.numel()].view(value.shape)
        staged.copy_(value)
        return staged


def _copying(inner: Step) -> Step:
    def copied(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}

    return lambda iterator, model: inner(map(copied, iterator), model)


def _one_object(batches: Iterator[Any]) -> Iterator[Any]:
    batch: dict[str, Any] = {}
    for contents in batches:
        batch.update(contents)
        yield batch


def _reading_two(inner: Step) -> Step:
    def step(iterator: Any, model: Any) -> Any:
        output, loss = inner(iter([next(iterator)]), model)
        return output, _weighing(loss, next(iterator)["labels"].float().mean())

    return step


class _Counted:
    """A loader that knows its position and its length."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return next(self._batches)

    def __len__(self) -> int:
        return 10 * len(WEIGHTS)


def _by_attribute(inner: Step) -> Step:
    def step(iterator: Any, model: Any) -> Any:
        output, loss = inner(iterator, model)
        return output, _weighing(loss, WEIGHTS[iterator.position % len(WEIGHTS)])

    return step


def _by_length(inner: Step) -> Step:
    def step(iterator: Any, model: Any) -> Any:
        output, loss = inner(iterator, model)
        return output, _weighing(loss, 1 / len(iterator))

    return step


def _listed(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        ends = {"cu_seqlens": batch["cu_seqlens"].tolist()} if "cu_seqlens" in batch else {}
        yield {**batch, "input_ids": list(batch["input_ids"]), **ends}


def _stacking(inner: Step) -> Step:
    def stacked(batch: dict[str, Any]) -> dict[str, Any]:
        ends = batch.get("cu_seqlens")
        more = {} if ends is None else {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
        return {**batch, "input_ids": torch.stack(batch["input_ids"]), **more}

    return lambda iterator, model: inner(map(stacked, iterator), model)


def _adding_up(inner: Step) -> Step:
    totals: dict[int, torch.Tensor] = {}

    def step(iterator: Any, model: Any) -> Any:
        total = totals.setdefault(id(model), torch.zeros(()))
        output, loss = inner(iterator, model)

        def adding(losses: torch.Tensor, *about: Any) -> Any:
            value, reported = loss(losses, *about)
            total.add_(value.detach())
            return value, {name: total for name in reported}

        return output, adding

    return step


def _padding_later(inner: Step) -> Step:
    calls: dict[int, int] = {}

    def padded(batch: dict[str, Any]) -> dict[str, Any]:
        mask, missing = batch["attention_mask"], -batch["input_ids"].shape[1] % MULTIPLE
        if mask is None:  # documents that are packed
            return batch
        length = mask.shape[-1] + missing
        rows = {name: pad(value, (0, missing)) for name, value in batch.items() if name != "attention_mask"}
        return {**rows, "attention_mask": torch.triu(torch.ones(1, 1, length, length), 1).bool()}

    def step(iterator: Any, model: Any) -> Any:
        calls[id(model)] = calls.get(id(model), 0) + 1
        return inner(map(padded, iterator) if calls[id(model)] > UNPADDED else iterator, model)

    return step


def _over_replicas(inner: Step) -> Step:
    def step(iterator: Any, model: Any) -> Any:
        output, loss = inner(iterator, model)

        def shared(losses: torch.Tensor, *about: Any) -> Any:
            tokens = torch.tensor(float(losses.numel()))
            dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
            return _weighing(loss, 2 * losses.numel() / tokens)(losses, *about)

        return output, shared

    return step


LOOPS = {
    "plain": Loop(),
    "counts its calls": Loop(_counting, refused=""),
    "keeps a list": Loop(_listing, refused=""),
    "fills one buffer": Loop(_copying, _Staging, refused="yield tensors that are not used anew"),
    "yields one object": Loop(
        lambda inner: lambda iterator, model: inner(map(dict, iterator), model),
        _one_object,
        refused="yields one dict for microbatches",
    ),
    "reads two items": Loop(_reading_two, refused="reads more than one item for a microbatch"),
    "uses an attribute": Loop(_by_attribute, _Counted, refused="uses position of its data iterator"),
    "uses a length": Loop(_by_length, _Counted, refused=r"uses len\(\) of its data iterator"),
    "has lists": Loop(_stacking, _listed, refused="the lengths of documents are not known"),
    "adds up in one tensor": Loop(_adding_up),
    "pads later": Loop(_padding_later, refused=""),
    "communicates in its loss": Loop(_over_replicas, refused=""),
}
"""The loops by name."""


def trained(
    name: str, model: list[Any], counts: tuple[int, ...], lengths: tuple[int, ...], **about: Any
) -> own_loop.Record:
    """Train by the loop ``name``; other arguments are as for ``own_loop.train``."""
    loop, batches = LOOPS[name], own_loop.batches
    own_loop.batches = lambda *args: loop.data(batches(*args))
    step = loop.step(about.pop("forward_step_func", own_loop.forward_step))
    try:
        return own_loop.train(model, counts, lengths, forward_step_func=step, seq_length=1, **about)
    finally:
        own_loop.batches = batches
