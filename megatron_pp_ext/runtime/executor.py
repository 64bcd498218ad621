"""The loop over one rank's actions.

The executor knows the order and the messages; a ``Stage`` knows what an action does.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.plan import RankPlan, Step
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.messages import Arrival, Message


class Stage(Protocol):
    """One stage of the model on this rank.

    Tensors that pass between stages are detached: a stage makes its input require a gradient
    itself and keeps what its backward will need, by microbatch.
    """

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Run the stage on ``activation``, or on the stage's own data where it is None, on the first stage.

        Return the input of the next stage; the executor ignores it on the last stage.
        """

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run both halves of the backward at once.

        ``gradient`` is that of the stage's output (None on the last stage).  Return that of its
        input (None on the first).
        """

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Compute the gradient of the input only, and leave the weights' for ``backward_weight``."""

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradient of the weights that ``backward_input`` left."""


class Recorder(Protocol):
    """Is notified of every action; ``runtime.recorder`` has one that keeps their times and bytes."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for the computation of ``action``, its messages excluded."""


class _NoRecorder:
    def during(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()


def execute(
    plan: RankPlan,
    stages: Mapping[int, Stage],
    channels: Channels,
    recorder: Recorder | None = None,
    *,
    flush: bool = True,
) -> None:
    """Run one training step: every action of ``plan`` in order, with its messages.

    ``stages`` maps the numbers of this rank's stages to the stages.  On return all actions have
    run, all messages have left, and the gradients are in the parameters.  Without ``flush`` messages may
    stay in flight, for a later step to take.
    """
    recorder = recorder or _NoRecorder()
    handed_over: dict[Message, torch.Tensor] = {}
    for step in plan.steps:
        _post(step.receives, channels)
        received = _take(step, plan.rank, handed_over, channels)
        with recorder.during(step.action):
            produced = _perform(step.action, stages[step.action.stage], received)
        received = None
        if step.target is None:
            continue
        if produced is None:
            raise RuntimeError(
                f"stage {step.action.stage} produced nothing for {step.target} in {step.action}"
            )
        if step.target_rank == plan.rank:
            handed_over[step.target] = produced.detach()
        else:
            channels.send(step.target_rank, produced)
        # A produced tensor that outlived its step would be counted, and held, as an activation.
        del produced
    _post(plan.left_open, channels)
    if flush:
        channels.close()


def _post(receives: Iterable[Arrival], channels: Channels) -> None:
    for peer, message in receives:
        channels.post(peer, message)


def _take(
    step: Step, rank: int, handed_over: dict[Message, torch.Tensor], channels: Channels
) -> torch.Tensor | None:
    if step.source is None:
        return None
    if step.source_rank == rank:
        return handed_over.pop(step.source)
    return channels.receive(step.source_rank, step.source)


def _perform(action: Action, stage: Stage, received: torch.Tensor | None) -> torch.Tensor | None:
    match action.kind:
        case Kind.F:
            return stage.forward(action.microbatch, received)
        case Kind.B:
            return stage.backward(action.microbatch, received)
        case Kind.I:
            return stage.backward_input(action.microbatch, received)
        case Kind.W:
            stage.backward_weight(action.microbatch)
            return None
