"""Full recomputation of stages that run by Megatron's plans of layers.

Megatron recomputes whole layers inside of ``TransformerBlock.forward``, which plans pass over, and refuses
the flag in pairs.  Here the layers of a plan are cut into the segments that Megatron would recompute
together.  Their forward keeps no graph.  Only the input of a segment and the states of the random number
generators outlive it.  When the backward takes the last layer of a segment, all layers of the segment run
forward once more, with a graph, and their backwards follow one by one.  So no more than one segment is
there as a whole, for each backward that runs.

The repeated forward runs alone: its exchanges of tokens are hidden by nothing.  Layers of multi-token
prediction are not recomputed, since their forward changes what the plan keeps for the chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_pp_ext.integration.patching import hook

_WHY = "--recompute-granularity full of layers that run in pairs"
_PLANS = "megatron.core.models.common.model_chunk_schedule_plan"


@hook(
    f"{_PLANS}:TransformerModelChunkSchedulePlan.run",
    "f_schedule_plan b_schedule_plan b_grad pre_forward pre_backward post_forward post_backward",
    _WHY,
)
def cut_into_segments(
    stock: Callable[..., Any], forward: Any, backward: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cut the layers of a plan into segments before its forward, where the config asks for it."""
    if forward is not None:
        _cut(forward._transformer_layers)
    return stock(forward, backward, *args, **kwargs)


@hook(
    f"{_PLANS}:TransformerLayerSchedulePlan.run",
    "f_layer b_layer f_input b_grad is_last_layer_in_bwd",
    _WHY,
)
def forward_without_graph(
    stock: Callable[..., Any],
    f_layer: Any,
    b_layer: Any,
    f_input: Any = None,
    b_grad: Any = None,
    is_last_layer_in_bwd: bool = False,
) -> tuple[Any, Any]:
    """Keep the input of a segment before its first layer's forward, and no more after its last one's."""
    segment = getattr(f_layer, "segment", None)
    if segment is not None and f_layer is segment.layers[0]:
        segment.begin(f_input)
    output, gradient = stock(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
    if segment is not None and f_layer is segment.layers[-1]:
        segment.end(output)
    return output, gradient


@hook(f"{_PLANS}:TransformerModelChunkSchedulePlan.pop_layer", "self", _WHY)
def repeat_before_backward(stock: Callable[[Any], Any], self: Any) -> Any:
    """Run a segment forward again before the backward of its last layer."""
    layer = stock(self)
    segment = getattr(layer, "segment", None)
    if segment is not None and layer is segment.layers[-1]:
        segment.repeat()
    return layer


def sizes(config: Any, count: int) -> Iterator[int]:
    """Yield the numbers of layers that are recomputed together, of a stage with ``count`` layers."""
    size = config.recompute_num_layers
    if config.recompute_method == "block":
        yield from (1,) * min(size, count)
        return
    for start in range(0, count, size):
        yield min(size, count - start)


def _cut(layers: Sequence[Any]) -> None:
    if not layers or layers[0].config.recompute_granularity != "full":
        return
    of_decoder = [layer for layer in layers if isinstance(layer.layer, TransformerLayer)]
    start = 0
    for size in sizes(of_decoder[0].config if of_decoder else layers[0].config, len(of_decoder)):
        segment = Segment(tuple(of_decoder[start : start + size]))
        for layer in segment.layers:
            layer.segment = segment
        start += size


@dataclass(slots=True, eq=False)
class Segment:
    """Plans of ``layers`` that are recomputed together, in the order of their forwards."""

    layers: tuple[Any, ...]
    input: torch.Tensor | None = None
    states: tuple[Any, ...] = ()

    def begin(self, activation: torch.Tensor) -> None:
        """Keep ``activation``, the input of the first layer, and let all nodes run without a graph."""
        self.input, self.states = activation, random._get_all_rng_states()
        for node in self._nodes():
            node.forward_func = torch.no_grad()(node.forward_func)

    def end(self, output: torch.Tensor) -> None:
        """Release the tensors of the nodes; ``output`` takes the gradient from the next layer."""
        for layer in self.layers:
            streams = [stream() for stream in (layer.comp_stream, layer.comm_stream)]
            for tensor in _tensors(layer):
                # It was made on one of the two streams, and the other one may still read it.
                for stream in streams:
                    tensor.record_stream(stream)
            vars(layer.layer_state).clear()
        for node in self._nodes():
            node.forward_func = node.forward_func.__wrapped__
            node.inputs = node.output = None
            node.detached = node.before_detached = ()
        output.requires_grad_()

    def repeat(self) -> None:
        """Run all layers forward with a graph, on the random numbers of the first time."""
        activation, self.input = self.input, None
        with random._fork_rng(), torch.enable_grad():
            random._set_all_rng_states(*self.states)
            for layer in self.layers:
                layer.segment = None
                activation, _ = TransformerLayerSchedulePlan.run(layer, None, f_input=activation)

    def _nodes(self) -> Iterator[Any]:
        for layer in self.layers:
            yield from _nodes(layer)


def _nodes(layer: Any) -> Iterator[Any]:
    return (node for node in vars(layer).values() if isinstance(node, ScheduleNode))


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    for node in _nodes(layer):
        outputs = node.output if isinstance(node.output, tuple) else (node.output,)
        for value in (*(node.inputs or ()), *outputs, *node.detached):
            if isinstance(value, torch.Tensor):
                yield value
