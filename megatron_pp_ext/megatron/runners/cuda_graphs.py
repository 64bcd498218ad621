"""CUDA graphs under a schedule that flushes.

**A whole iteration** (--cuda-graph-impl full_iteration): Megatron's ``FullCudaGraphWrapper`` captures
whatever its forward-backward function launches, in whatever order.  Objects cannot be sent by a graph, so
losses that have to reach another rank are sent after each replay.

**Graphs of layers** (transformer_engine): Transformer Engine's ``make_graphed_callables`` captures forwards
and backwards of several microbatches in one pool of memory, and they have to be replayed in that order, whose
i-th backward of a chunk belongs to its i-th forward.  Here every chunk of the model is captured once for each
**slot** (``schedule.slots``), by a call of its own and with one pool a slot.  The graphs of a microbatch are
those of its slot, so they follow any order.

Where the backward is split, a slot has three graphs: of F, of I and of the weight gradients of all graphed
layers of the chunk.  Their operands, among them the gradients of the layers' outputs, live until the last one
is captured, and so nobody overwrites them between I and W.

None of this has run on a GPU: --pipeline-unproved permits it, and the part ``graphs`` of scripts/gpu_check.sh
tries it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs as stock_graphs

from megatron_pp_ext.megatron.core.data_parallel import Gradients, defer_weights, is_deferred
from megatron_pp_ext.megatron.core.parameters import has_second_use
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.runners import choose
from megatron_pp_ext.megatron.runners.flushed import FlushedSteps
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule.slots import Slots


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
    "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs",
    "self",
    "--cuda-graph-impl transformer_engine: graphs of layers for each microbatch in flight",
)
def capture_slots(stock: Callable[[Any], None], self: Any) -> None:
    """Capture each layer once for each slot of the schedule, in place of once for each microbatch."""
    runner = choose.has_run(self.model)
    if runner is None or not self.flattened_callables:
        stock(self)
        return
    assert isinstance(runner.steps, FlushedSteps)
    plans = runner.steps.training_plans()
    if not plans:
        raise RuntimeError(
            "there is a graph for each microbatch in flight, and no step has run that has any: raise "
            "--cuda-graph-warmup-steps to 1 or more"
        )
    slots = GraphSlots(max(Slots.of(plan.steps).count for plan in plans))
    start = self._start_capturing()
    stages = runner.steps.placement.stages_of(plans[0].rank)
    _Capture(self, stages, slots, runner.steps.splits_backward).run()
    runner.steps.graphs = slots
    self._graphs_created = True
    self._finish_capturing(start)


class GraphSlots:
    """The slots of the running step, of which ``count`` have graphs."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._plan: RankPlan | None = None
        self._by_unit: Mapping[tuple[int, int], int] = {}
        self.microbatches = 0
        """The number of microbatches of the step."""

    def begin(self, plan: RankPlan) -> None:
        """Give the microbatches of a step slots by its ``plan``."""
        if plan is not self._plan:
            self._plan, self._by_unit = plan, Slots.of(plan.steps).by_unit
            self.microbatches = len({microbatch for _, microbatch in self._by_unit})

    def of(self, stage: int, microbatch: int) -> int | None:
        """Return the slot of a microbatch of a stage; None if it has no graphs, and runs eagerly."""
        slot = self._by_unit.get((stage, microbatch))
        return None if slot is None or slot >= self.count else slot


class LayerGraphs(Sequence[Callable[..., Any]]):
    """What Megatron finds in ``layer.cuda_graphs``: the graphs of each slot, by the number of a microbatch.

    It is false where the microbatch that the layer is about to compute has none, so that Megatron runs the
    layer eagerly.  Its length is the number of microbatches, modulo which Megatron takes a microbatch's.
    """

    def __init__(self, layer: Any, stage: int, slots: GraphSlots) -> None:
        self._layer, self._stage, self._slots = layer, stage, slots
        self.by_slot: list[Callable[..., Any]] = []

    def __bool__(self) -> bool:
        return self._slots.of(self._stage, getattr(self._layer, "current_microbatch", 0)) is not None

    def __len__(self) -> int:
        return self._slots.microbatches

    @overload
    def __getitem__(self, microbatch: int) -> Callable[..., Any]: ...
    @overload
    def __getitem__(self, microbatch: slice) -> Sequence[Callable[..., Any]]: ...
    def __getitem__(self, microbatch: int | slice) -> Any:
        assert isinstance(microbatch, int)
        slot = self._slots.of(self._stage, microbatch)
        if slot is None:
            raise IndexError(f"microbatch {microbatch} of stage {self._stage} has no graph")
        return self.by_slot[slot]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.by_slot)


@dataclass(frozen=True, slots=True)
class _WeightGraph:
    """The graph of a chunk's weight gradients in one slot, and the ``weights`` whose gradients it adds to."""

    graph: Any
    weights: Sequence[torch.nn.Parameter]

    def deferred(self) -> Callable[[], None]:
        """Return the replay as work for a W; until it is done, no other gradient completes the weights'.

        Called in F: what Transformer Engine returns as a weight's gradient, a dummy where the product adds it
        by itself, comes before the end of the chunk's backward.
        """

        def gradients() -> Gradients:
            self.graph.replay()
            return ()

        return defer_weights(self.weights, gradients)

    @property
    def is_free(self) -> bool:
        return not any(map(has_second_use, self.weights))


class _Entry(torch.autograd.Function):
    """Passes on the input of a chunk's first graphed layer; its backward is the end of their backwards.

    It leaves ``work``, if any, for W, or does it now within a whole backward.  The gradient is copied out of
    the slot's memory: it may leave after another microbatch has the slot.  ``anchor`` is any tensor with a
    gradient, so that this backward runs for an input that needs none too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        work: Callable[[], None] | None,
        is_free: bool,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        ctx.work, ctx.is_free = work, is_free
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        if ctx.work is not None:
            STORE.defer(ctx.work, is_free=ctx.is_free)
        return None, None, None, gradients[0].clone()


class _FirstLayer:
    """The graphs of a chunk's first graphed layer in one slot: Transformer Engine's, and that of W."""

    def __init__(self, graphs: Any, weights: _WeightGraph | None) -> None:
        self._graphs, self._weights = graphs, weights
        self._anchor = torch.empty(0, device=torch.cuda.current_device(), requires_grad=True)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            weights = self._weights
            work, is_free = (None, True) if weights is None else (weights.deferred(), weights.is_free)
            hidden = _Entry.apply(self._anchor, work, is_free, hidden)
        return self._graphs(hidden, *args, **kwargs)

    def reset(self) -> None:
        """Free all graphs of the slot that are not another layer's (``TECudaGraphHelper``)."""
        self._graphs.reset()
        if self._weights is not None:
            self._weights.graph.reset()


class _Capture:
    """Captures the chunks of ``helper``, a ``TECudaGraphHelper``, which are the ``stages`` of this rank."""

    def __init__(self, helper: Any, stages: Sequence[int], slots: GraphSlots, splits: bool) -> None:
        self._helper, self._stages, self._slots, self._splits = helper, stages, slots, splits

    def run(self) -> None:
        """Capture all slots, and hand the graphs to their layers."""
        helper = self._helper
        args, kwargs = self._samples()
        options = self._options()
        layers_of_slots = {
            layer: LayerGraphs(layer, stage, self._slots)
            for stage, layers in zip(self._stages, helper.callables_per_chunk, strict=True)
            for layer in layers
        }
        for slot in range(self._slots.count):
            pool, first = torch.cuda.graph_pool_handle(), 0
            for stage, layers in zip(self._stages, helper.callables_per_chunk, strict=True):
                start = first * self._slots.count + slot * len(layers)
                place = slice(start, start + len(layers))
                of_chunk = _of_layers(options, first, len(layers), len(helper.flattened_callables))
                if kwargs:
                    of_chunk["sample_kwargs"] = kwargs[place]
                graphs = self._chunk(Owner(stage, slot), layers, args[place], of_chunk, pool)
                for layer, graph in zip(layers, graphs, strict=True):
                    layers_of_slots[layer].by_slot.append(graph)
                first += len(layers)
        for layer, graphs_of_layer in layers_of_slots.items():
            layer.cuda_graphs = graphs_of_layer

    def _chunk(
        self, owner: Owner, layers: Sequence[Any], args: Sequence[Any], options: dict[str, Any], pool: Any
    ) -> list[Any]:
        """Capture a chunk's ``layers`` in the slot ``owner.microbatch``; return each one's graphs."""
        if not layers:
            return []
        options |= {"_order": [1, -1], "pool": pool}
        if "_num_layers_per_chunk" in options:
            options["_num_layers_per_chunk"] = [len(layers)]
        if self._splits:
            # It lets layers share the gradients of their outputs, and overwrites outputs that a W may read.
            options.pop("_reuse_graph_input_output_buffers", None)
        is_sequence_parallel = self._helper.config.sequence_parallel
        random = get_cuda_rng_tracker().fork() if is_sequence_parallel else nullcontext()
        collecting = STORE.collecting(owner, captured=True) if self._splits else nullcontext()
        with random, collecting:
            first, *others = stock_graphs.make_graphed_callables(tuple(layers), tuple(args), **options)
        return [_FirstLayer(first, self._weights(owner, layers, pool)), *others]

    def _weights(self, owner: Owner, layers: Sequence[Any], pool: Any) -> _WeightGraph | None:
        """Capture what the backwards of ``layers`` have left for W, if anything."""
        weights = [weight for layer in layers for weight in layer.parameters() if is_deferred(weight)]
        if not weights:
            if self._splits:
                STORE.run(owner)
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            STORE.run(owner)
        return _WeightGraph(graph, weights)

    def _samples(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return arguments of the layers to capture, by Megatron: by chunk, then slot, then layer.

        No two slots share memory: all backwards come after all forwards.
        """
        helper = copy.copy(self._helper)
        helper.num_microbatches = self._slots.count
        chunks = range(1, helper.num_model_chunks + 1)
        order = [sign * chunk for sign in (1, -1) for chunk in chunks for _ in range(self._slots.count)]
        args, kwargs = helper._get_sample_arguments(order)
        return args, kwargs

    def _options(self) -> dict[str, Any]:
        """Return what Megatron passes to Transformer Engine besides arguments of the layers."""
        helper = copy.copy(self._helper)
        helper._get_sample_arguments = lambda *order: ((), ())
        _, options = helper._get_cuda_graph_input_data()
        return dict(options)


def _of_layers(options: Mapping[str, Any], first: int, count: int, total: int) -> dict[str, Any]:
    """Return ``options`` for ``count`` layers from the ``first`` on; some have a value for each layer."""
    return {
        name: value[first : first + count] if isinstance(value, tuple) and len(value) == total else value
        for name, value in options.items()
    }
