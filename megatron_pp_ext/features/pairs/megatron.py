"""Stages that run layer by layer, so that the forward of one microbatch can run with another's backward.

Megatron takes a layer apart into attention, dispatch, experts and combination
(``TransformerLayerSchedulePlan`` in megatron.core.models.common.model_chunk_schedule_plan), and runs the
parts of a forward and of a backward in turn: what one of them computes hides what the other sends to the
experts of other ranks.  Which halves meet, and in which order, is the schedule's (``Schedule.paired``).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel.utils import ScheduleNode, set_streams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_pp_ext.around import around
from megatron_pp_ext.features.pairs.runtime import Pair, PairRunner
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.releases import CORE_0_17
from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.megatron.runners.flushed import Step
from megatron_pp_ext.megatron.runners.model_stage import ModelStage
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Action, Label

_WHOLE_LAYERS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@around
def check_as_planned(stock: Callable[[Any], None], self: Any) -> None:
    """Let a model's config pass Megatron's checks of pairs where only Megatron's own schedule needs them.

    Megatron refuses --overlap-moe-expert-parallel-comm without virtual stages, since its own 1F1B has no
    pairs.  The plans of layers, which pairs are run by, do not care how many chunks a rank has.  It refuses
    full recomputation, which ``cut_into_segments`` adds to the plans.  Every other check of pairs stays.
    Nothing changes where Megatron's own schedule runs.
    """
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.source is None or not self.overlap_moe_expert_parallel_comm:
        stock(self)
        return
    replaced = dict(_replaced(self, pipeline.placement.chunks))
    values = {name: getattr(self, name) for name in replaced}
    try:
        for name, value in replaced.items():
            setattr(self, name, value)
        stock(self)
    finally:
        for name, value in values.items():
            setattr(self, name, value)


def _replaced(config: Any, chunks: int) -> Iterator[tuple[str, Any]]:
    """Yield the settings that Megatron's checks of pairs see with another value, with that value."""
    if chunks == 1:
        yield "virtual_pipeline_model_parallel_size", 1
    if config.recompute_granularity == "full":
        yield from ((name, None) for name in _WHOLE_LAYERS)


_NO_FORWARD = {"forward_step_func": None, "data_iterator": None, "f_model": None, "input_tensor": None}
_NO_BACKWARD = dict.fromkeys(("b_model", "b_input_tensor", "b_output_tensor", "b_output_tensor_grad"))


class PlannedStage(ModelStage):
    """One chunk of the model whose layers run by Megatron's plans.

    A backward needs the plan that its forward was run by.  Under a schedule with pairs, forwards and
    backwards that stand alone are therefore run by plans too, as in Megatron's own schedule.
    """

    def forward_half(self, microbatch: int, activation: torch.Tensor | None) -> dict[str, Any]:
        """Return the forward arguments of ``combined_forward_backward_step`` for ``microbatch``."""
        inputs = self.inputs
        return {
            "forward_step_func": inputs.forward_step_func,
            "data_iterator": inputs.iterators[self._chunk],
            "f_model": inputs.model[self._chunk],
            "input_tensor": activation,
            "f_model_chunk_id": self._vp_stage,
            "is_first_microbatch": self.is_first(microbatch),
            "current_microbatch": microbatch,
        }

    def backward_half(self, microbatch: int, gradient: torch.Tensor | None) -> dict[str, Any]:
        """Return the backward arguments of ``combined_forward_backward_step`` for ``microbatch``."""
        activation, output = self.in_flight.pop(microbatch)
        return {
            "b_model": self.inputs.model[self._chunk],
            "b_input_tensor": activation,
            "b_output_tensor": output,
            "b_output_tensor_grad": gradient,
        }

    def combined(self, **halves: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Run one half or both; return the output, its number of tokens, and the input's gradient."""
        inputs = self.inputs
        return combined_1f1b.combined_forward_backward_step(
            num_microbatches=inputs.microbatches,
            forward_data_store=inputs.losses,
            config=inputs.config,
            collect_non_loss_data=inputs.collect_non_loss_data,
            **halves,
        )

    def _forward(self, microbatch: int, activation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        with self.at_work():
            output, tokens, _ = self.combined(**self.forward_half(microbatch, activation), **_NO_BACKWARD)
        return output, tokens

    def _backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.at_work():
            _, _, input_gradient = self.combined(**_NO_FORWARD, **self.backward_half(microbatch, gradient))
        return input_gradient


@hook(
    "megatron.core.models.common.utils:TransformerLayerNode.backward_dw",
    "self",
    "weight gradients of a backward in a pair, while tokens travel",
    before={"megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode.backward_dw": "self"},
)
def run_where_planned(stock: Callable[[Any], None], self: Any) -> None:
    """Run the weight gradients that a backward in a pair has put off so far.

    The weight gradients of a B in a pair come where a plan calls ``backward_dw`` of its nodes, as Megatron
    does for those that Transformer Engine has put off (--delay-wgrad-compute): after the input gradients of
    experts, while tokens travel, and after those of the attention.  ``runtime.split`` puts them off, for
    local layers too.
    """
    stock(self)
    STORE.run_part()


@hook(
    "megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func",
    "self outputs output_grad",
    "pairs where the first layers take no gradient, as after a frozen embedding",
)
def skip_what_takes_no_gradient(stock: Callable[..., Any], self: Any, outputs: Any, output_grad: Any) -> Any:
    """Run a node's backward for the outputs that need a gradient.

    Autograd goes no further by itself than weights that train.  A plan calls the backward of all its nodes.
    """
    trained = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
    if trained:
        stock(self, *zip(*trained, strict=True))
    return output_grad


@contextmanager
def planned(step: Step) -> Iterator[None]:
    """Let the stages of a step with pairs run by Megatron's plans, whose streams are made from here on.

    So do those of a rank without pairs where layers are graphs: Megatron lets these return what plans take.
    """
    config = step.inputs.config
    is_graphed = getattr(config, "cuda_graph_impl", None) == "transformer_engine"
    takes_plans = config.overlap_moe_expert_parallel_comm and not step.inputs.forward_only
    if step.plan.has(Pair) or (is_graphed and takes_plans):
        # Older releases have streams of one priority alone.
        options = {"high_priority": getattr(config, "high_priority_a2a_comm_stream", False)}
        set_streams(**{k: v for k, v in options.items() if k in inspect.signature(set_streams).parameters})
        step.make_stage = PlannedStage
        if not step.transport.is_alone:
            step.parts.append(PairRunner(run_pair))
    yield


def run_pair(
    stages: Mapping[int, PlannedStage],
    forward: Action,
    activation: torch.Tensor | None,
    backward: Action,
    gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a pair of the planned ``stages`` together; see ``PairRunner``."""
    front, back = stages[forward.stage], stages[backward.stage]
    front.before_forward(forward.microbatch, activation)
    # The weight gradients come where the plans of layers have a place for them.
    # The loss is computed on the chunk of the forward, which has to be the one that Megatron answers for.
    backward_half = back.during_backward(backward.kind, backward.microbatch, in_parts=True)
    with backward_half, front.at_work():
        output, tokens, input_gradient = front.combined(
            **front.forward_half(forward.microbatch, activation),
            **back.backward_half(backward.microbatch, gradient),
        )
    return front.after_forward(forward.microbatch, activation, output, tokens), input_gradient


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
    """Cut the layers of a plan into segments before its forward, where the config asks for it.

    Megatron recomputes whole layers inside of ``TransformerBlock.forward``, which plans pass over, and
    refuses the flag in pairs.  Instead the layers of a plan are cut into the segments that Megatron would
    recompute together.  Layers of multi-token prediction are not recomputed, since their forward changes what
    the plan keeps for the chunk.
    """
    if forward is not None:
        _cut(forward._transformer_layers)
    return stock(forward, backward, *args, **kwargs)


@hook(
    f"{_PLANS}:TransformerLayerSchedulePlan.run", "f_layer b_layer f_input b_grad is_last_layer_in_bwd", _WHY
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
    """Plans of ``layers`` that are recomputed together, in the order of their forwards.

    Their forward keeps no graph.  Only the input of a segment and the states of the random number generators
    outlive it.  When the backward takes the last layer of a segment, all layers of the segment run forward
    once more, with a graph, and their backwards follow one by one.  So no more than one segment is there as a
    whole, for each backward that runs.  The repeated forward runs alone: its exchanges of tokens are hidden
    by nothing.
    """

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


_NAMES = ("moe_dispatch", "moe_combine")
"""The names of a plan's exchanges, which the direction follows."""


@hook(
    "megatron.core.pipeline_parallel.utils:ScheduleNode.stream_acquire_context",
    "self name",
    "--pipeline-trace of exchanges of tokens",
    since=CORE_0_17,
)
@contextmanager
def record_exchange(stock: Callable[..., Any], self: Any, name: str | None = None) -> Iterator[None]:
    """Report the exchanges of tokens in Megatron's plans of layers, each in its own stream."""
    recorder = tracing.recorder()
    recorded: AbstractContextManager[None] = nullcontext()
    if recorder is not None and name is not None and name.startswith(_NAMES):
        recorded = recorder.span(Label("exchange", name))
    with stock(self, name), recorded:
        yield
