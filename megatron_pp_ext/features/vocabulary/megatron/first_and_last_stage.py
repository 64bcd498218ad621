"""The first and the last stage where all ranks of a pipeline share the vocabulary.

Stock's one forward is done here in two pieces.

* The batch of a microbatch is read ahead of its forward, because all ranks need the tokens.  The script's
  forward step is called with a model that notes its arguments; the forward is that call.
* The loss function of the last stage is called later, when the loss of every token is known.
"""

import inspect
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features.vocabulary.megatron.parts import EmbeddingPart, OutputPart
from megatron_pp_ext.integration.core.stock_backward import backward_of_stock
from megatron_pp_ext.integration.runners.model_stage import (
    ForwardStep,
    ModelStage,
    StepInputs,
    step_of_one_call,
)

FLAG = "--pipeline-vocabulary shared"


class ReadAhead:
    """The first stage: reads each batch when its tokens are needed, and keeps it for the forward."""

    def __init__(self, inputs: StepInputs, lookup: EmbeddingPart) -> None:
        self._inputs, self._lookup = inputs, lookup
        self._calls: dict[int, tuple[Any, Any, Any]] = {}

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Read the batch of ``microbatch``, the next one, and return its tokens, batch x tokens."""
        (model, *_), (iterator, *_) = self._inputs.model, self._inputs.iterators
        calls: list[tuple[Any, Any]] = []

        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append((args, kwargs))
            return torch.empty(0)

        # A model's own attribute comes before its class's method, and scripts see the model they know.
        model.forward = note
        try:
            _, loss_function = step_of_one_call(self._inputs.forward_step_func, iterator, model, FLAG)
        finally:
            del model.forward
        ((args, kwargs),) = calls
        (whole,) = unwrap_model([model])
        arguments = inspect.signature(whole.forward).bind(*args, **kwargs).arguments
        self._calls[microbatch] = args, kwargs, loss_function
        return arguments["input_ids"]

    def forward(self, microbatch: int, embedded: torch.Tensor) -> ForwardStep:
        """Return the forward step that goes on with the batch."""
        args, kwargs, loss_function = self._calls.pop(microbatch)

        def step(iterator: Any, model: Any) -> Any:
            self._lookup.given = embedded
            return model(*args, **kwargs), loss_function

        return step


class Head:
    """The last stage: a ``runtime.output.LossHead`` of the script's loss function and stock's arithmetic."""

    def __init__(self, inputs: StepInputs, output: OutputPart) -> None:
        self._inputs, self._output = inputs, output
        self._loss_functions: dict[int, Any] = {}

    def forward(self, microbatch: int) -> ForwardStep:
        """Return the script's forward step; its loss function is kept for later."""

        def step(iterator: Any, model: Any) -> Any:
            output, loss_function = step_of_one_call(self._inputs.forward_step_func, iterator, model, FLAG)
            self._loss_functions[microbatch] = loss_function
            return output, loss_function

        return step

    def labels(self, microbatch: int) -> torch.Tensor:
        """See ``runtime.output.LossHead``; hidden states are tokens x batch, and so are the labels here."""
        labels, self._output.labels = self._output.labels, None
        if labels is None:
            raise RuntimeError(
                "--pipeline-vocabulary shared needs a forward step that gives its model labels; leave it out"
            )
        self._shape = labels.shape
        return labels.transpose(0, 1).contiguous()

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        inputs, chunk = self._inputs, len(self._inputs.model) - 1
        batch, tokens = self._shape
        token_losses = (
            losses.view(tokens, batch).transpose(0, 1).contiguous().requires_grad_(not inputs.forward_only)
        )
        vp_stage = chunk if chunk else None
        if inputs.config.timers is not None:
            inputs.config.timers("forward-compute", log_level=2).start()  # stock's function stops it
        with torch.set_grad_enabled(not inputs.forward_only):
            loss, tokens_of_loss = stock_schedules.forward_step_calc_loss(
                inputs.model[chunk],
                # A script's loss function may write into what it gets.
                token_losses.clone(),
                self._loss_functions.pop(microbatch),
                inputs.config,
                vp_stage,
                inputs.collect_non_loss_data,
                inputs.microbatches,
                inputs.losses,
                inputs.cp_size,
                True,
            )
        inputs.tokens += tokens_of_loss
        if inputs.forward_only:
            return losses
        gradient: torch.Tensor = backward_of_stock(token_losses, loss, None, inputs.config)
        return gradient.transpose(0, 1).reshape(-1)


class FirstStage(ModelStage):
    """The first stage, whose input is embedded elsewhere; it gives a gradient for it if that ``trains``."""

    def __init__(self, ahead: ReadAhead, trains: bool, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._ahead, self._trains = ahead, trains

    @property
    def _gives_gradient(self) -> bool:
        return self._trains

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        assert activation is not None
        # A first stage with an input would take its first dimension for the length of the sequence.
        return self._stock_forward(self._ahead.forward(microbatch, activation), microbatch, None)


class LastStage(ModelStage):
    """The last stage, whose output is the hidden state, and whose loss comes later."""

    def __init__(self, head: Head, *about: Any, **more: Any) -> None:
        super().__init__(*about, **{**more, "is_last": False})
        self._head = head

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        return self._stock_forward(self._head.forward(microbatch), microbatch, activation)
