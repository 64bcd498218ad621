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
class _Loss:
    """The loss of the last stage's outputs so far, ``whole``, and their gradient once it is computed."""

    whole: torch.Tensor
    loss: torch.Tensor
    gradient: torch.Tensor | None = None


@dataclass(slots=True)
class _Microbatch:
    """What a stage knows of a microbatch whose slices are under way.

    ``left`` is the number of units that have yet to end.  On the last stage ``outputs`` are those of units,
    and ``losses`` has one for each chain, by its first unit.
    """

    left: int
    call: Call = field(default_factory=Call)
    loss_function: Any = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, _Loss] = field(default_factory=dict)


class SlicedStage(ModelStage):
    """One chunk of the model, whose units are slices of a microbatch's sequences, or packs of short ones.

    The script's forward step runs once for each microbatch, with the first unit: it reads the whole batch,
    of which the model gets the unit's part.  The model is called with the same arguments for the others.  On
    the last stage the script's loss function gets the outputs of all units as one, so that losses, their
    normalization and what is reported are those of whole microbatches.

    Where a microbatch has several sequences, the backward of one may come before the forward of another.  The
    loss function then runs once for each, with zeros for outputs that are not known yet, and only the last
    call, which has all, is reported.
    """

    def __init__(
        self, *about: Any, units: Units, calls: list[Calls], knows_documents: bool = False, **named: Any
    ) -> None:
        super().__init__(*about, **named)
        self._units, self._calls = units, calls[self._chunk]
        self._knows_documents = knows_documents
        self._microbatches: dict[int, _Microbatch] = {}
        self._sequences: dict[int, Sequence] = {}

    def _slice(self, unit: int) -> tuple[_Microbatch, Slice]:
        one, chain = self._units.units[unit], self._units.chain_of[unit]
        if one.microbatch not in self._microbatches:
            self._microbatches[one.microbatch] = _Microbatch(len(self._units.of_microbatch[one.microbatch]))
        if len(chain) > 1 and chain[0] not in self._sequences:
            length = self._units.documents[one.microbatch][one.pieces[0].document]
            self._sequences[chain[0]] = Sequence(Owner(self._stage, chain[0]), length)
        sizes = tuple(piece.end - piece.begin for piece in one.pieces)
        here = Slice(
            self._sequences.get(chain[0]),
            one.prefix,
            one.prefix + sum(sizes),
            self._units.positions(unit),
            sum(self._units.documents[one.microbatch]),
            sizes if self._knows_documents else (),
        )
        return self._microbatches[one.microbatch], here

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
                output, _ = self._stock_forward(forward_step, unit, activation, [], self._of_step(unit))
        finally:
            self._calls.call = None
        found.call.output = None
        if unit == self._units.of_microbatch[self._units.units[unit].microbatch][-1]:
            found.call.arguments = None  # the whole batch, of which backwards need nothing
        tokens: torch.Tensor | int = 0
        if self._is_last:
            found.outputs[unit] = output.detach()
            if output._base is not None:
                output = output.clone()  # Megatron does not free the numbers of a view
            if self._units.is_last(unit):
                tokens = self._loss(found, unit)
        if self.inputs.forward_only:
            self._end(unit, is_chain_over=self._units.is_last(unit))
        return output, tokens

    def _of_step(self, unit: int) -> int:
        """Return as how many units the step's microbatches count, if all are cut as that of ``unit`` is.

        Megatron divides by it a loss, and the scale of what experts' routers add to gradients.
        """
        return self._units.microbatches * len(self._units.of_microbatch[self._units.units[unit].microbatch])

    def _loss(self, found: _Microbatch, unit: int) -> torch.Tensor | int:
        """Compute the loss of a microbatch of the known outputs; return its tokens if these are all."""
        microbatch = self._units.units[unit].microbatch
        whole = self._whole(found, microbatch)
        whole.requires_grad_(not self.inputs.forward_only)
        has_all = len(found.outputs) == len(self._units.of_microbatch[microbatch])
        loss, tokens = self._stock_forward(
            lambda *_: (whole, self._scaled(found, unit)),
            unit,
            None,
            self.inputs.losses if has_all else [],
            self._of_step(unit),
        )
        found.losses[self._units.chain_of[unit][0]] = _Loss(whole, loss)
        if not has_all:
            return 0
        found.outputs.clear()
        return tokens

    def _whole(self, found: _Microbatch, microbatch: int) -> torch.Tensor:
        """Return the outputs of a microbatch in the order of its tokens, with zeros for unknown ones."""
        numbers = self._units.of_microbatch[microbatch]
        known = [found.outputs.get(number) for number in numbers]
        like = next(one for one in known if one is not None)
        if len(self._units.documents[microbatch]) == 1 and not any(one is None for one in known):
            return torch.cat([one for one in known if one is not None], dim=1)
        tokens = sum(self._units.documents[microbatch])
        whole = like.new_zeros(len(like), tokens, *like.shape[2:])
        for number, one in zip(numbers, known, strict=True):
            if one is not None:
                begin = 0
                for first, end in self._units.positions(number):
                    whole[:, first:end] = one[:, begin : begin + end - first]
                    begin += end - first
        return whole

    def _scaled(self, found: _Microbatch, unit: int) -> Any:
        """Return the loss function of a step that counts units: it is divided by those of a microbatch less.

        Megatron divides a loss by the step's microbatches, and at the same place it divides the scale of what
        experts' routers add to gradients, which each unit adds.
        """
        count = self._of_step(unit) // self._units.microbatches

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
            gradient = self._part_of_gradient(found.losses[self._units.chain_of[unit][0]], here)
        with at_work_on(here):
            made = super()._backward(unit, gradient)
        self._end(unit, is_chain_over=self._units.is_first(unit))
        return made

    def _end(self, unit: int, is_chain_over: bool) -> None:
        """Forget what slices share once their sequence ``is_chain_over``, and a microbatch at its end."""
        chain, microbatch = self._units.chain_of[unit][0], self._units.units[unit].microbatch
        found = self._microbatches[microbatch]
        found.left -= 1
        if is_chain_over:
            self._sequences.pop(chain, None)
            found.losses.pop(chain, None)
        if not found.left:
            del self._microbatches[microbatch]

    def _part_of_gradient(self, of_chain: _Loss, here: Slice) -> torch.Tensor:
        if of_chain.gradient is None:
            with self.at_work():
                of_chain.gradient = stock_schedules.backward_step(
                    of_chain.whole, of_chain.loss, None, self.inputs.config
                )
        assert of_chain.gradient is not None
        parts = [of_chain.gradient[:, begin:end] for begin, end in here.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)
