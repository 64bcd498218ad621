"""The runs of ``tests/megatron/test_failed_steps.py``, written to a file.

Steps fail at one of a rank's operations, or within it.  The other rank of the pipeline then fails as one does
whose peer is gone.  The connections of both are made anew, and a step follows that has to be as good as the
first.  All of it runs in a process of its own, in which Megatron is as it comes.
"""

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch
import torch.distributed as dist

import megatron_pp_ext
from megatron_pp_ext.features.offload import megatron
from megatron_pp_ext.megatron.requested import Settings
from megatron_pp_ext.megatron.runners import choose, flushed
from megatron_pp_ext.megatron.runners.transport import ProcessGroups
from megatron_pp_ext.runtime import split
from megatron_pp_ext.runtime.operations import Operation
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.rank import Rank
from tests.support import own_loop
from tests.support.few_trials import few_trials

MICROBATCHES = 6


@dataclass(frozen=True)
class Case:
    """A ``schedule`` with the arguments of ``install`` and of the model, and where its steps are to fail."""

    schedule: str
    places: tuple[str, ...]
    install: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (own_loop.LENGTH,)

    @property
    def chunks(self) -> int:
        return own_loop.CHUNKS[self.schedule]


VARIES: dict[str, Any] = {
    "model": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
    "lengths": (8, 5, 11, 3, 9, 6),
}
CASES = {
    "whole backwards": Case("interleaved", ("F", "B", "within F", "within B", "Receive", "Send", "Drain")),
    "split": Case("zb-h1", ("F", "I", "W", "within F", "within I", "within W", "Post")),
    "a V": Case("v-half", ("F", "I", "W", "within I", "within W")),
    "reductions in the step": Case("zb-h1", ("I", "W", "Drain"), model={"overlaps": True}),
    "offload": Case(
        "v-half", ("F", "W", "within F", "OffloadCopy", "Free", "Reload", "EndOffloading"), {"offload": 0.7}
    ),
    "vocabulary": Case(
        "zb-h1", ("F", "I", "W", "S", "T", "within F", "Begin", "TakeEmbedded"), {"vocabulary": "shared"}
    ),
    "slices": Case("v-half", ("F", "I", "W", "within F", "within I"), {"slice_tokens": 4}),
    "an order": Case("zb-h1", ("F", "I", "W", "within F"), {"order": "rule"}, **VARIES),
    "slices in an order": Case(
        "zb-h1", ("F", "I", "W", "within F"), {"slice_tokens": 4, "order": "rule"}, **VARIES
    ),
}


class Failed(Exception):
    """The failure that was asked for, or that of a rank whose peer has failed."""


def on_rank(rank: int, name: str) -> dict[str, Any]:
    """Return the steps of stock and of case ``name``: the first one, and one after each failure."""
    own_loop.start()
    megatron.SMALLEST = 1
    case = CASES[name]
    model = own_loop.build(1, **{**case.model, "overlaps": False})
    results: dict[str, Any] = {"stock": stepped(model, case), "failures": {}}
    with megatron_pp_ext.installed(case.schedule, ranks=2, microbatches=MICROBATCHES, **case.install):
        model = own_loop.build(case.chunks, **case.model)
    results["first"] = stepped(model, case)
    for place in case.places:
        failure = failed(model, case, place, key=f"failed at {place}")
        connect_anew(model)
        results["failures"][place] = failure, stepped(model, case), len(split.STORE)
    return results


def stepped(model: list[Any], case: Case) -> own_loop.Record:
    """Return the results of a step; no weights change."""
    record = own_loop.Record()
    for chunk in model:
        chunk.zero_grad_buffer()
    iterators = [own_loop.batches(case.lengths) for _ in model]
    about = {"seq_length": 1} if len(case.lengths) > 1 else {}
    losses = own_loop.run_step(model, iterators, MICROBATCHES, **about)
    own_loop.finalize_model_grads(model)
    record.losses.append([float(entry["loss"]) for entry in losses])
    for parameter_name, parameter in own_loop.global_parameters(model):
        record.gradients[parameter_name] = parameter.main_grad.clone()
    return record


def failed(model: list[Any], case: Case, place: str, key: str) -> str:
    """Let a step fail at ``place``; return the error."""
    store = dist.distributed_c10d._get_default_store()
    with ExitStack() as stack:
        stack.enter_context(failing_with_peers(store, key))
        stack.enter_context(within(model, place) if place.startswith("within") else at(place))
        try:
            stepped(model, case)
        except Failed as error:
            store.set(key, "")
            return str(error)
    return ""


@contextmanager
def failing_with_peers(store: dist.Store, key: str) -> Iterator[None]:
    """Let waits for another rank fail once that has failed.

    A thread waits, for ever in the end: gloo's messages are complete only to whoever waits for them, and one
    that is waited for too long closes the connection.
    """
    wait = dist.Work.wait

    def wait_or_fail(work: dist.Work, *about: Any) -> Any:
        waiting = Thread(target=wait, args=(work, *about), daemon=True)
        waiting.start()
        while waiting.is_alive():
            waiting.join(0.01)
            if waiting.is_alive() and store.check([key]):
                raise Failed("the other rank has failed")
        return True

    with patch.object(dist.Work, "wait", wait_or_fail):
        yield


@contextmanager
def at(place: str) -> Iterator[None]:
    """Fail where the middle one of the operations called ``place`` would run."""

    def execute(plan: RankPlan, rank: Rank) -> None:
        matching = [
            candidate
            for candidate in plan.operations
            if place in (name_of(candidate), type(candidate).__name__)
        ]
        for operation in plan.operations:
            if matching and operation is matching[len(matching) // 2]:
                raise Failed(place)
            operation.run(rank)

    with patch.object(flushed, "execute", execute):
        yield


def name_of(operation: Operation) -> str:
    """Return the letter of an action."""
    action = getattr(operation, "action", None)
    return str(action.kind) if action is not None else ""


@contextmanager
def within(model: list[Any], place: str) -> Iterator[None]:
    """Fail in the middle of an action, after some of its layers."""
    kind, count = place.removeprefix("within "), [0]

    def fail_later(*unused: Any) -> None:
        count[0] += 1
        if count[0] == 11:
            raise Failed(place)

    def fail_in_backward(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(fail_later)

    layers = [layer for chunk in model for layer in chunk.module.decoder.layers]
    with ExitStack() as stack:
        if kind in "FB":
            hook: Callable[..., None] = fail_later if kind == "F" else fail_in_backward
            for handle in [layer.register_forward_hook(hook) for layer in layers]:
                stack.callback(handle.remove)
        elif kind == "I":
            defer = split.WeightGradientStore.defer

            def deferring(store: Any, work: Any, *tensors: Any, **about: Any) -> None:
                fail_later()
                defer(store, work, *tensors, **about)

            stack.enter_context(patch.object(split.WeightGradientStore, "defer", deferring))
        else:
            defer_weights = split.WeightGradientStore.defer

            def failing(store: Any, work: Any, *tensors: Any, **about: Any) -> None:
                defer_weights(store, lambda: (fail_later(), work())[1], *tensors, **about)

            stack.enter_context(patch.object(split.WeightGradientStore, "defer", failing))
        yield


def connect_anew(model: list[Any]) -> None:
    """Give the runner of ``model`` connections on which no message is left; collective."""
    gc.collect()
    runner, transport = choose._runners[model[0]], ProcessGroups(Settings())
    runner.steps._transport = runner._losses._transport = transport
    runner._losses._object_send = None


if __name__ == "__main__":
    file, name = sys.argv[1:]
    torch.set_num_threads(1)
    with few_trials(str(Path(file).parent)):
        Path(file).write_bytes(pickle.dumps(run_ranks(on_rank, 2, name)))
