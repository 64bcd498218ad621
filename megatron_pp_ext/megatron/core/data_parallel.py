"""Data parallelism around the microbatches of a step.

Megatron's ``DistributedDataParallel`` counts the gradients that arrive during the last microbatch and reduces
a bucket once it is full.  Under a split backward they arrive in two actions: those of norms, biases and
embeddings in I, those of the linear weights in W, perhaps many actions later.  So a chunk counts during two
of its actions, its last I and its last W (or its last B, which is both), and not during any other; the
reduction of a bucket then starts inside the chunk's last W, and overlaps whatever the rank does after it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing

from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import Placement


@hook(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
    "self param",
    "reduction of a gradient once its second half is in",
)
def count_when_complete(stock: Callable[..., Any], ddp: Any, param: Any) -> Callable[..., None]:
    """Count a parameter only when no part of its gradient is left for W.

    What stock returns runs when autograd is done with a parameter, even if its layers returned None.
    ``defer_weights`` counts the weights whose gradient W adds.
    """
    accumulate = stock(ddp, param)

    def hook(*unused: Any) -> None:
        if not is_deferred(param):
            accumulate(*unused)
        elif param.grad is not None:
            # The weight has a second use, such as an embedding's, whose gradient autograd brings.
            bucket_group = ddp.param_to_bucket_group[param]
            counts, bucket_group.is_last_microbatch = bucket_group.is_last_microbatch, False
            accumulate(*unused)
            bucket_group.is_last_microbatch = counts

    if ddp.ddp_config.overlap_grad_reduce:
        param.count = functools.partial(_count, ddp, param)
    return hook


def _count(ddp: Any, param: torch.nn.Parameter) -> None:
    if not is_graph_capturing():  # stock's hook does not count then either
        ddp.param_to_bucket_group[param].register_grad_ready(param, ddp.force_all_reduce)


class _Sum:
    """The gradients that one run of autograd's engine finds for one weight, added up in their order.

    The engine does the same before it hands a weight its gradient: in the weight's own precision, so the last
    bits depend on it.  Nested runs, as of recomputed layers, have sums of their own.
    """

    def __init__(self, run: int) -> None:
        self.run, self.remaining = run, 0
        self._total: torch.Tensor | None = None

    def add(self, weight: Any, gradient: torch.Tensor) -> None:
        gradient = gradient.to(weight.dtype)  # under autocast a product has another
        self._total = gradient if self._total is None else self._total.add_(gradient)

    def use_is_done(self, weight: Any) -> None:
        """Note that one use of ``weight`` is done; the last one hands on the sum."""
        self.remaining -= 1
        if not self.remaining and self._total is not None:
            add_gradient(weight, self._total)
            self._total = None


Gradients = Iterable[tuple[Any, torch.Tensor]]
"""Weights, and the summands of each one's gradient."""


def defer_weights(weights: Iterable[Any], gradients: Callable[[], Gradients]) -> Callable[[], None]:
    """Return work that adds ``gradients()`` to the gradients of ``weights``, called in the backward for them.

    A weight that this backward uses several times gets them at the last use, as their sum; a weight that is
    not among ``gradients()``, whose product has added its gradient itself, gets none.  The last piece of work
    counts the weight.
    """
    sums = {weight: _open_sum(weight) for weight in weights}

    def work() -> None:
        for weight, gradient in gradients():
            sums[weight].add(weight, gradient)
        for weight, gradient_sum in sums.items():
            gradient_sum.use_is_done(weight)
            weight.deferred -= 1
            if not weight.deferred and hasattr(weight, "count"):
                weight.count()

    return work


def _open_sum(weight: Any) -> _Sum:
    """Return the sum of ``weight`` in the present run of autograd's engine, with one use more."""
    run = torch._C._current_graph_task_id()
    gradient_sum: _Sum | None = getattr(weight, "sum_of_uses", None)
    if gradient_sum is None or gradient_sum.run != run:
        weight.sum_of_uses = gradient_sum = _Sum(run)
    gradient_sum.remaining += 1
    weight.deferred = getattr(weight, "deferred", 0) + 1
    return gradient_sum


def add_gradient(parameter: Any, gradient: torch.Tensor) -> None:
    """Add ``gradient`` to the one that Megatron's data parallelism, or else torch, keeps of ``parameter``."""
    if hasattr(parameter, "main_grad"):
        parameter.main_grad.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)  # as autograd does under autocast
    else:
        parameter.grad.add_(gradient)


def is_deferred(weight: torch.nn.Parameter) -> bool:
    """Return whether work that adds to ``weight``'s gradient still waits for its W."""
    return bool(getattr(weight, "deferred", 0))


def forget_deferred(weight: Any) -> None:
    """Forget work on ``weight`` that no W will run, since its step has failed."""
    weight.__dict__.pop("deferred", None)
    weight.__dict__.pop("sum_of_uses", None)


class LastActions(NamedTuple):
    """The last two actions of a stage that add to its gradients.

    ``input`` is its last I and ``weight`` its last W; where the two are one action, it is a B.
    """

    input: Action
    weight: Action


def last_actions(actions: Sequence[Action]) -> dict[int, LastActions]:
    """Return the last actions of every stage among a rank's ``actions``; none for an evaluation."""
    inputs = {action.stage: action for action in actions if action.kind in (Kind.I, Kind.B)}
    weights = {action.stage: action for action in actions if action.kind in (Kind.W, Kind.B)}
    return {stage: LastActions(inputs[stage], weights[stage]) for stage in inputs}


def _ends_of_gradients(actions: Sequence[Action]) -> list[tuple[int, Kind]]:
    """Return (stage, kind) of the actions after which more of the gradients is complete, in their order."""
    last = {action for pair in last_actions(actions).values() for action in pair}
    return [(action.stage, action.kind) for action in actions if action in last]


def _bucket_groups(chunk: Any) -> Iterator[Any]:
    """Yield the groups of gradients that ``chunk`` reduces together; none without Megatron's wrapper."""
    for kind in ("bucket_groups", "expert_parallel_bucket_groups"):
        yield from getattr(chunk, kind, ())


class _OnStream(NamedTuple):
    """A reduction within an instance of the distributed optimizer and across instances, on a ``stream``.

    Where there are several instances, Megatron leaves no handle of a reduction.  Before it has counted
    gradients, the missing handle lets it reduce once more what a chunk has reduced as a whole.
    """

    stream: Any

    def wait(self) -> None:
        """Let what the device does next wait for the reduction."""
        torch.cuda.current_stream().wait_stream(self.stream)


class DataParallel:
    """The data-parallel side of one training step on this rank.

    ``config`` is the model's.  The trainer put three functions into it: ``no_sync_func`` keeps a chunk from
    counting, ``grad_sync_func`` (only with --align-grad-reduce, the default) reduces a whole chunk at once,
    ``param_sync_func`` (only with --align-param-gather) gathers its weights.  Each is a list with one entry a
    chunk, or a single function where there is one chunk.

    With ``force_all_reduce`` no chunk is reduced before the gradients are finalized, which is the only place
    where stock obeys it.  With ``forward_only`` nothing is gathered, since evaluation does so beforehand.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], config: Any, forward_only: bool, force_all_reduce: bool
    ) -> None:
        self._model = model
        self._no_sync = _each(config.no_sync_func, model)
        self._reduce = None if force_all_reduce else _each(config.grad_sync_func, model)
        self._gather = None if forward_only else _each(config.param_sync_func, model)
        self._uncounted = [ExitStack() for _ in model]
        # After the last of these a chunk's gradients are complete: its last W, and its part of a split head.
        self._unfinished = [1 for _ in model]
        self._waiting: list[int] | None = None
        self._is_forced = force_all_reduce

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced while the step goes on."""
        settings = (getattr(chunk, "ddp_config", None) for chunk in self._model)
        is_counted = any(getattr(config, "overlap_grad_reduce", False) for config in settings)
        return not self._is_forced and (self._reduce is not None or is_counted)

    def reduce_as(
        self,
        ordinary: Sequence[Action],
        actions: Sequence[Action],
        placement: Placement,
        as_whole: bool = False,
    ) -> None:
        """Reduce the chunks in the order in which they are complete in an ``ordinary`` step.

        ``actions`` are this step's.  Where they complete gradients in another order than the ordinary
        ones do, each chunk is reduced as a whole; and with ``as_whole`` in any case, since other replicas may
        complete them in other orders.
        """
        ends = _ends_of_gradients(ordinary)
        self._waiting = [placement.chunk_of(stage) for stage, kind in ends if kind in (Kind.W, Kind.B)]
        if self._reduce is None and (as_whole or ends != _ends_of_gradients(actions)):
            chunks: Sequence[Any] = self._model
            self._reduce = [chunk.start_grad_sync for chunk in chunks]

    def expect_part(self, chunk: int) -> None:
        """Wait with the reduction of ``chunk`` for ``part``, which ends its part of a split head."""
        self._unfinished[chunk] += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround all actions of a step, in which no chunk counts; the first two gather their weights."""
        self._end_reductions()
        for chunk in range(min(2, len(self._model))):
            self._start_gather(chunk)
        try:
            for chunk in range(len(self._model)):
                self._stop_counting(chunk)
            yield
        except BaseException:
            for weight in (weight for chunk in self._model for weight in chunk.parameters()):
                forget_deferred(weight)
            raise
        finally:
            for uncounted in self._uncounted:
                uncounted.close()

    def _end_reductions(self) -> None:
        """Wait for reductions that a step has launched which failed before it could finish them."""
        for group in (group for chunk in self._model for group in _bucket_groups(chunk)):
            if (handle := group.grad_reduce_handle) is not None:
                handle.wait()
                group.grad_reduce_handle = None

    def first_forward(self, chunk: int) -> None:
        """Start gathering the weights of the chunk after ``chunk``, whose first forward comes next."""
        if chunk > 0:
            self._start_gather(chunk + 1)

    @contextmanager
    def backward(self, chunk: int, action: Action, last: LastActions) -> Iterator[None]:
        """Surround an I, W or B of ``chunk``, whose last ones are ``last``, in which it counts."""
        with self._counting(chunk) if action in last else nullcontext():
            yield
        if action == last.weight:
            self._finish(chunk)

    @contextmanager
    def part(self, chunk: int) -> Iterator[None]:
        """Surround the end of the gradient that ``expect_part`` announced."""
        with self._counting(chunk):
            yield
        self._finish(chunk)

    @contextmanager
    def _counting(self, chunk: int) -> Iterator[None]:
        if self._reduce is None:
            self._uncounted[chunk].close()
        yield
        if self._reduce is None:
            self._stop_counting(chunk)

    def _finish(self, chunk: int) -> None:
        self._unfinished[chunk] -= 1
        if self._reduce is None or self._unfinished[chunk]:
            return
        waiting = [chunk] if self._waiting is None else self._waiting
        while waiting and not self._unfinished[waiting[0]]:
            first = waiting.pop(0)
            self._reduce[first](self._model[first].parameters())
            for group in _bucket_groups(self._model[first]):
                if group.ddp_config.num_distributed_optimizer_instances > 1:
                    group.grad_reduce_handle = _OnStream(group.communication_stream)

    def _stop_counting(self, chunk: int) -> None:
        if self._no_sync is not None:
            self._uncounted[chunk].enter_context(self._no_sync[chunk]())

    def _start_gather(self, chunk: int) -> None:
        if self._gather is not None and chunk < len(self._model):
            self._gather[chunk](self._model[chunk].parameters())


def _each(function: Any, model: Sequence[torch.nn.Module]) -> list[Callable[..., Any]] | None:
    if function is None or isinstance(function, list):
        return function
    return [function for _ in model]
