"""A stage that works on slices of sequences; ``ModelStage`` works on whole ones."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules

from megatron_pp_ext.features.slices.megatron.layers import Call, Calls
from megatron_pp_ext.features.slices.runtime.prefixes import Sequence, Slice, at_work_on
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.integration.runners.model_stage import ModelStage
from megatron_pp_ext.runtime.activation_meter import Owner


@dataclass(slots=True)
class _Microbatch:
    """What a stage knows of a microbatch whose slices are under way.

    ``outputs`` are those of the last stage's slices, until the loss is computed of all of them.  Then
    ``whole`` is what it was computed of, and ``gradient`` that of the whole output.
    """

    sequence: Sequence
    call: Call = field(default_factory=Call)
    loss_function: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    whole: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


class SlicedStage(ModelStage):
    """One chunk of the model, whose units are slices of a microbatch's sequences.

    The script's forward step runs once for each microbatch, with the first slice: it reads the whole batch,
    of which the model gets the slice.  The model is called with the same arguments for the others.  On the
    last stage the script's loss function gets the outputs of all slices as one, so that losses, their
    normalization and what is reported are those of whole microbatches.
    """

    def __init__(self, *about: Any, units: Units, calls: list[Calls], **named: Any) -> None:
        super().__init__(*about, **named)
        self._units, self._calls = units, calls[self._chunk]
        self._microbatches: dict[int, _Microbatch] = {}

    def _slice(self, unit: int) -> tuple[_Microbatch, Slice]:
        one = self._units.units[unit]
        if one.microbatch not in self._microbatches:
            (length,) = self._units.documents[one.microbatch]
            self._microbatches[one.microbatch] = _Microbatch(Sequence(Owner(self._stage, unit), length))
        found = self._microbatches[one.microbatch]
        (piece,) = one.pieces
        return found, Slice(found.sequence, piece.begin, piece.end)

    def _forward(self, unit: int, activation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | int]:
        found, here = self._slice(unit)
        self._calls.call = found.call

        def forward_step(iterator: Any, model: Any) -> tuple[Any, None]:
            if found.call.arguments is not None:
                return model(**found.call.arguments), None
            output, found.loss_function = self.inputs.forward_step_func(iterator, model)
            if output is not found.call.output:
                raise ValueError(
                    "slices of sequences need a forward step which returns what the model returns, and this "
                    "one changes it: do so in the loss function, or leave out --pipeline-slice-tokens"
                )
            return output, None

        try:
            with at_work_on(here):
                output, _ = self._stock_forward(forward_step, unit, activation, [], len(self._units))
        finally:
            self._calls.call = None
        found.call.output = None
        tokens: torch.Tensor | int = 0
        if self._is_last:
            found.outputs.append(output.detach())
            if output._base is not None:
                output = output.clone()  # Megatron does not free the numbers of a view
            if self._units.is_last(unit):
                tokens = self._whole_loss(found, unit)
        if self.inputs.forward_only and self._units.is_last(unit):
            del self._microbatches[self._units.units[unit].microbatch]
        return output, tokens

    def _whole_loss(self, found: _Microbatch, unit: int) -> torch.Tensor | int:
        """Compute the loss of a microbatch of the outputs of all its slices; return its tokens."""
        whole = torch.cat(found.outputs, dim=1)
        whole.requires_grad_(not self.inputs.forward_only)
        found.outputs.clear()
        found.whole = whole
        found.loss, tokens = self._stock_forward(
            lambda *_: (whole, self._scaled(found)), unit, None, self.inputs.losses, len(self._units)
        )
        return tokens

    def _scaled(self, found: _Microbatch) -> Any:
        """Return the loss function of a step that counts units: it is divided by those of a microbatch less.

        Megatron divides a loss by the step's microbatches, and at the same place it divides the scale of what
        experts' routers add to gradients, which each unit adds.
        """
        count = len(self._units) // self._units.microbatches

        def scaled(output: torch.Tensor, **about: Any) -> Any:
            made = found.loss_function(output, **about)
            is_sum = len(made) == 3 if isinstance(made, tuple) else False
            if about or (is_sum and self.inputs.config.calculate_per_token_loss):
                return made
            return (made[0] * count, *made[1:])

        return scaled

    def _backward(self, unit: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        found, here = self._slice(unit)
        if self._is_last:
            gradient = self._part_of_gradient(found, here)
        with at_work_on(here):
            made = super()._backward(unit, gradient)
        if self._units.is_first(unit):
            del self._microbatches[self._units.units[unit].microbatch]
        return made

    def _part_of_gradient(self, found: _Microbatch, here: Slice) -> torch.Tensor:
        if found.gradient is None:
            with self.at_work():
                found.gradient = stock_schedules.backward_step(
                    found.whole, found.loss, None, self.inputs.config
                )
            found.whole = found.loss = None
        assert found.gradient is not None
        return found.gradient[:, here.start : here.end].contiguous()
