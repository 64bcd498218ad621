"""The loop over one rank's actions.

The executor knows the order and the messages; what an action *does* is a Stage's business.
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
        """Run the stage on ``activation`` (None on the first stage: it reads its own data).

        Returns what the next stage gets; the executor ignores it on the last stage.
        """

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Both halves of the backward at once.

        ``gradient`` is that of the stage's output (None on the last stage); returns that of its
        input (None on the first).
        """

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Only the gradient of the input; the weights' is left for ``backward_weight``."""

    def backward_weight(self, microbatch: int) -> None:
        """The gradient of the weights that ``backward_input`` left."""


class Recorder(Protocol):
    """Hears of every action; see ``runtime.recorder`` for one that keeps what it hears."""

    def during(self, action: Action) -> AbstractContextManager[None]:
        """A context around the computing of ``action``, its messages excluded."""


class _Silence:
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

    ``stages`` maps the stages of this rank to what computes them.  On return all actions have
    run and all messages have left; gradients are in the parameters.  Without ``flush`` messages may
    stay in flight, for a later step to take.
    """
    recorder = recorder or _Silence()
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
