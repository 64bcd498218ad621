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
from megatron_pp_ext.schedule.messages import Arrival, Exchange, Launch, Message


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


class Pairs(Protocol):
    """Runs the two actions of a pair together."""

    def run(
        self,
        forward: Action,
        activation: torch.Tensor | None,
        backward: Action,
        gradient: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do ``forward`` on ``activation`` and ``backward`` (I or B) with ``gradient``.

        The tensors are those of ``Stage.forward``, ``Stage.backward`` and ``Stage.backward_input``.  Return
        the output of the forward and the gradient of the input of the backward's stage.
        """


class Vocabulary(Protocol):
    """A rank's part of a vocabulary that all ranks share; ``shared_vocabulary`` has one.

    It stands where a stage before the first one would, and one behind the last: it gives the first stage its
    input, takes the last stage's output and gives its gradient, and takes the gradient of the input.
    """

    def embedded(self, microbatch: int) -> torch.Tensor:
        """Return the first stage's input, on its rank."""

    def take_input_gradient(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the first stage's input, on its rank; a frozen embedding needs none."""

    def keep(self, microbatch: int, hidden: torch.Tensor) -> None:
        """Take the last stage's output, on its rank."""

    def launch(self, exchange: Exchange) -> None:
        """Begin an exchange with the other ranks; what is computed next does not wait for it."""

    def scores(self, microbatch: int) -> None:
        """Do S: this rank's part of the logits, and of all that follows from them."""

    def output_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the last stage's output, on its rank."""

    def weight_gradient(self, microbatch: int) -> None:
        """Do T: the gradient of this rank's part of the weight."""

    def close(self) -> None:
        """End the step."""


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
    vocabulary: Vocabulary | None = None,
    pairs: Pairs | None = None,
) -> None:
    """Run one training step: every action of ``plan`` in order, with its messages.

    ``stages`` maps the numbers of this rank's stages to the stages.  On return all actions have
    run, all messages have left, and the gradients are in the parameters.  Without ``flush`` messages may
    stay in flight, for a later step to take.  ``vocabulary`` is this rank's part of it, where ranks share it.
    ``pairs`` runs the pairs of the plan; without it their actions run, and are recorded, one after the other.
    """
    if (plan.loss_stage is None) is not (vocabulary is None):
        raise ValueError("a plan needs a vocabulary exactly where its ranks share one; give both or neither")
    recorder = recorder or _NoRecorder()
    handed_over: dict[Message, torch.Tensor] = {}
    steps = iter(plan.steps)
    for step in steps:
        _launch(step.launches, channels, vocabulary)
        if step.is_paired:
            _run_pair((step, next(steps)), plan.rank, stages, channels, recorder, handed_over, pairs)
            continue
        if step.action.kind in (Kind.S, Kind.T):
            assert vocabulary is not None
            with recorder.during(step.action):
                _perform_part(step.action, vocabulary)
            continue
        is_first = vocabulary is not None and step.action.stage == 0
        is_loss = vocabulary is not None and step.action.stage == plan.loss_stage
        received = _take(step, plan.rank, handed_over, channels, vocabulary)
        with recorder.during(step.action):
            if vocabulary is not None and is_loss and step.action.kind in (Kind.I, Kind.B):
                received = vocabulary.output_gradient(step.action.microbatch)
            produced = _perform(step.action, stages[step.action.stage], received)
        received = None
        if vocabulary is not None and is_loss and step.action.kind is Kind.F:
            assert produced is not None
            vocabulary.keep(step.action.microbatch, produced)
        if vocabulary is not None and is_first and step.action.kind in (Kind.I, Kind.B):
            vocabulary.take_input_gradient(step.action.microbatch, produced)
        _hand_on(step, produced, plan.rank, handed_over, channels)
        # A produced tensor that outlived its step would be counted, and held, as an activation.
        del produced
    _launch(plan.left_open, channels, vocabulary)
    if vocabulary is not None:
        vocabulary.close()
    if flush:
        channels.close()


def _run_pair(
    steps: tuple[Step, Step],
    rank: int,
    stages: Mapping[int, Stage],
    channels: Channels,
    recorder: Recorder,
    handed_over: dict[Message, torch.Tensor],
    pairs: Pairs | None,
) -> None:
    """Run the two actions of a pair: both take their input before, and hand on their output behind it."""
    forward, backward = (step.action for step in steps)
    activation, gradient = (_take(step, rank, handed_over, channels, None) for step in steps)
    output: torch.Tensor | None
    if pairs is not None:
        # The forward is recorded within the backward, so that it is the first of the two in the record.
        with recorder.during(backward), recorder.during(forward):
            output, input_gradient = pairs.run(forward, activation, backward, gradient)
    else:
        with recorder.during(forward):
            output = _perform(forward, stages[forward.stage], activation)
        with recorder.during(backward):
            input_gradient = _perform(backward, stages[backward.stage], gradient)
    for step, produced in zip(steps, (output, input_gradient), strict=True):
        _hand_on(step, produced, rank, handed_over, channels)


def _hand_on(
    step: Step,
    produced: torch.Tensor | None,
    rank: int,
    handed_over: dict[Message, torch.Tensor],
    channels: Channels,
) -> None:
    """Send what ``step`` made to the rank of the next stage, or keep it where that is this rank."""
    if step.target is None:
        return
    if produced is None:
        raise RuntimeError(f"stage {step.action.stage} produced nothing for {step.target} in {step.action}")
    if step.target_rank == rank:
        handed_over[step.target] = produced.detach()
    else:
        channels.send(step.target_rank, produced)


def _launch(launches: Iterable[Launch], channels: Channels, vocabulary: Vocabulary | None) -> None:
    for one in launches:
        if isinstance(one, Arrival):
            channels.post(one.peer, one.message)
        elif vocabulary is not None:
            vocabulary.launch(one)


def _take(
    step: Step,
    rank: int,
    handed_over: dict[Message, torch.Tensor],
    channels: Channels,
    vocabulary: Vocabulary | None,
) -> torch.Tensor | None:
    if vocabulary is not None and step.action.kind is Kind.F and step.action.stage == 0:
        return vocabulary.embedded(step.action.microbatch)
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
    raise ValueError(f"{action} is no work of a stage")


def _perform_part(action: Action, vocabulary: Vocabulary) -> None:
    if action.kind is Kind.S:
        vocabulary.scores(action.microbatch)
    else:
        vocabulary.weight_gradient(action.microbatch)
