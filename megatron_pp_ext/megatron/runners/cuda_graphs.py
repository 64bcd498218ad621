"""CUDA graphs under a schedule that flushes.

**A whole iteration** (--cuda-graph-impl full_iteration): Megatron's ``FullCudaGraphWrapper`` captures
whatever its forward-backward function launches, in whatever order.  Objects cannot be sent by a graph, so
losses that have to reach another rank are sent after each replay.

**A graph for each layer** (transformer_engine): ``make_graphed_callables`` captures forwards and backwards in
the order ``_order`` of chunks, so that graphs share memory, and they must be replayed in that order.  Here it
is the order of the rank's plan.  The graph of a backward has the weight gradients of its layer in it: within
an I it computes both, and W what is outside of graphs.  (Transformer Engine captures a half of its own,
c - 0.5, only for weight gradients in its own queue, layer by layer.)  A W reads what graphs have written
long after their backward, so their outputs share no memory where the backward is split.

None of this has run on a GPU: --pipeline-unproved permits it, and the part ``graphs`` of scripts/gpu_check.sh
tries it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.runners import choose
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement

_BACKWARD = (Kind.I, Kind.B)
_GRAPHS = "megatron.core.transformer.cuda_graphs"
_captured: ContextVar[Sequence[Any]] = ContextVar("captured", default=())
"""The chunks of the model whose layers are being captured."""

_WHY = "--cuda-graph-impl transformer_engine: graphs in the order of the schedule"


@hook(
    "megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__",
    "self args kwargs",
    "--cuda-graph-impl full_iteration: losses that reach their rank after each replay",
)
def send_losses_after_replay(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Capture or replay a step without the messages of its losses, and send these."""
    runner = choose.runner_of(self.forward_backward_func, **kwargs)
    if runner is None:
        return stock(self, *args, **kwargs)
    runner.delivers_losses = False
    stock(self, *args, **kwargs)
    return runner.deliver(forward_only=bool(kwargs["forward_only"]))


@hook(
    f"{_GRAPHS}:convert_schedule_table_to_order",
    "num_warmup_microbatches num_model_chunks schedule_table",
    _WHY,
)
def order_of_plan(stock: Callable[..., list[int]], *args: Any, **kwargs: Any) -> list[int]:
    """Return the order of chunks in which this rank computes, in place of that of stock's schedule."""
    running = _running()
    return stock(*args, **kwargs) if running is None else order_of_chunks(*running)


@hook(
    f"{_GRAPHS}:get_overlap_moe_expert_parallel_comm_order",
    "order num_layers_per_chunk capture_wgrad_graph",
    _WHY,
)
def order_of_plan_in_pairs(
    stock: Callable[..., Any], order: Any, num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
) -> Any:
    """Return the order of layers in which this rank computes in pairs, and whose layer each forward is."""
    running = _running()
    if running is None:
        return stock(order, num_layers_per_chunk, capture_wgrad_graph)
    entries = list(order_of_layers(*running, num_layers_per_chunk))
    return [layer for layer, _ in entries], [place for _, place in entries]


@hook(f"{_GRAPHS}:TECudaGraphHelper._get_cuda_graph_input_data", "self", _WHY)
def keep_what_a_later_half_reads(stock: Callable[[Any], Any], self: Any) -> Any:
    """Let graphs share no outputs where a W reads them after their backward.

    Within it Megatron asks for the order of the chunks, and not by the model that has them.
    """
    token = _captured.set(self.model)
    try:
        samples, options = stock(self)
        running = _running()
    finally:
        _captured.reset(token)
    if running is not None and any(action.kind is Kind.W for action in running[0].actions):
        options.pop("_reuse_graph_input_output_buffers", None)
    return samples, options


def order_of_chunks(plan: RankPlan, placement: Placement) -> list[int]:
    """Return c for each forward and -c for each I or B of the rank's chunk c, which is 1 or more."""
    chunks = _chunks(plan, placement)
    return [
        chunks[action.stage] if action.kind is Kind.F else -chunks[action.stage]
        for action in plan.actions
        if action.kind is Kind.F or action.kind in _BACKWARD
    ]


def order_of_layers(
    plan: RankPlan, placement: Placement, layers: Sequence[int]
) -> Iterator[tuple[int, list[int] | None]]:
    """Yield n for each forward and -n for each backward of the rank's n-th graphed layer.

    ``layers`` are the numbers of graphed layers of the chunks.  With a forward comes its chunk, from 0, and
    the layer's place in it.  In a pair the layers of both alternate, forwards first, as plans run them.
    """
    chunks = _chunks(plan, placement)
    for step in plan.steps:
        forwards: list[tuple[int, list[int] | None]] = []
        backwards: list[tuple[int, list[int] | None]] = []
        for action in step:
            chunk = chunks[action.stage] - 1
            before = sum(layers[:chunk])
            if action.kind is Kind.F:
                forwards += [(before + at + 1, [chunk, at]) for at in range(layers[chunk])]
            elif action.kind in _BACKWARD:
                backwards += [(-before - at - 1, None) for at in reversed(range(layers[chunk]))]
        for pair in zip_longest(forwards, backwards):
            yield from filter(None, pair)


def _chunks(plan: RankPlan, placement: Placement) -> dict[int, int]:
    return {stage: chunk for chunk, stage in enumerate(placement.stages_of(plan.rank), 1)}


def _running() -> tuple[RankPlan, Placement] | None:
    """Return the plan of this rank's training steps; None where Megatron's own schedule runs."""
    runner = choose.has_run(_captured.get())
    if runner is None:
        return None
    assert isinstance(runner.steps, FlushedSteps)
    return runner.steps.training_plan(), runner.steps.placement
