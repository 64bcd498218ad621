"""Stages that run layer by layer, so that the forward of one microbatch can run with another's backward.

Megatron takes a layer apart into attention, dispatch, experts and combination
(``TransformerLayerSchedulePlan`` in megatron.core.models.common.model_chunk_schedule_plan), and runs the
parts of a forward and of a backward in turn: what one of them computes hides what the other sends to the
experts of other ranks.  Which halves meet, and in which order, is the schedule's (``Schedule.paired``).

The weight gradients of a B in a pair come where a plan calls ``backward_dw`` of its nodes, as Megatron does
for those that Transformer Engine has put off (--delay-wgrad-compute): after the input gradients of experts,
while tokens travel, and after those of the attention.  Here ``runtime.split`` puts them off, for local
layers too.

A backward needs the plan that its forward was run by.  Under a schedule with pairs, forwards and backwards
that stand alone are therefore run by plans too, as in Megatron's own schedule.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel.utils import set_streams

from megatron_pp_ext.features.pairs.runtime.operations import Pair, PairRunner
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.runners.model_stage import ModelStage
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Action

_NO_FORWARD = {"forward_step_func": None, "data_iterator": None, "f_model": None, "input_tensor": None}
_NO_BACKWARD = dict.fromkeys(("b_model", "b_input_tensor", "b_output_tensor", "b_output_tensor_grad"))


class PlannedStage(ModelStage):
    """One chunk of the model whose layers run by Megatron's plans."""

    def forward_half(self, microbatch: int, activation: torch.Tensor | None) -> dict[str, Any]:
        """Return what ``combined_forward_backward_step`` takes for the forward of ``microbatch``."""
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
        """Return what ``combined_forward_backward_step`` takes for the backward of ``microbatch``."""
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
    """Run the weight gradients that a backward in a pair has put off so far."""
    stock(self)
    STORE.run_part()


@hook(
    "megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func",
    "self outputs output_grad",
    "pairs where the first layers take no gradient, as after a frozen embedding",
)
def skip_what_takes_no_gradient(stock: Callable[..., Any], self: Any, outputs: Any, output_grad: Any) -> Any:
    """Run a node's backward for those of its outputs that something before them trains.

    Autograd goes no further by itself than weights that train.  A plan calls the backward of all its nodes.
    """
    trained = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
    if trained:
        stock(self, *zip(*trained, strict=True))
    return output_grad


@contextmanager
def planned(step: Step) -> Iterator[None]:
    """Let the stages of a step with pairs run by Megatron's plans, whose streams are made from here on."""
    if step.plan.has(Pair):
        # Older releases have streams of one priority alone.
        options = {"high_priority": getattr(step.inputs.config, "high_priority_a2a_comm_stream", False)}
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
    counted = back.during_backward(backward.kind, backward.microbatch, in_parts=True)
    with counted, front.at_work():
        output, tokens, input_gradient = front.combined(
            **front.forward_half(forward.microbatch, activation),
            **back.backward_half(backward.microbatch, gradient),
        )
    return front.after_forward(forward.microbatch, activation, output, tokens), input_gradient
