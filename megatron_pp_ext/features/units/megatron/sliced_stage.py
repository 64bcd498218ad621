"""A stage that works on slices of sequences; ``ModelStage`` works on whole ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_pp_ext.features.units.megatron.context_parallel import Parts, dealt_by
from megatron_pp_ext.features.units.megatron.layers import Call, Calls, calling
from megatron_pp_ext.features.units.megatron.states import indexers_count
from megatron_pp_ext.features.units.options import SLICE_FLAG
from megatron_pp_ext.features.units.runtime import Sequence, Slice, at_work_on
from megatron_pp_ext.features.units.units import Units
from megatron_pp_ext.megatron.runners.model_stage import ModelStage, step_of_one_call
from megatron_pp_ext.runtime.split import Owner


def _logged() -> dict[str, torch.Tensor]:
    """Return the sums of layers, by the names of the losses, that Megatron prints after a step."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # an older release
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        return {name: entry["values"] for name, entry in tracker.items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker()._metrics.items()}


@contextmanager
def of_part(share: float, config: Any = None) -> Iterator[None]:
    """Let the routers' losses of a slice count by its ``share`` of the tokens of its microbatch.

    Megatron takes them for those of a microbatch: it adds them to a log, here and where layers are
    recomputed, and multiplies their gradients by a scale, the same in all backwards, that it sets in every
    forward.  With the ``config`` of a model the context surrounds a backward.  Where losses are counted by
    tokens, gradients have the weight of their tokens already.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if config is None or config.calculate_per_token_loss:
        scale = None
    before = {name: values.clone() for name, values in _logged().items()}
    if scale is not None:
        scale = scale.clone()  # Megatron writes the next one into it
        MoEAuxLossAutoScaler.set_loss_scale(scale * share)
    try:
        yield
    finally:
        if scale is not None:
            MoEAuxLossAutoScaler.set_loss_scale(scale)
        for name, values in _logged().items():
            earlier = before.get(name, torch.zeros_like(values))
            values.copy_(earlier + (values - earlier) * share)


@dataclass(slots=True)
class _Loss:
    """The loss of the outputs so far, ``whole``, and their gradient once it is computed."""

    whole: torch.Tensor
    loss: torch.Tensor
    has_all: bool
    gradient: torch.Tensor | None = None


@dataclass(slots=True)
class _Microbatch:
    """The state of a microbatch whose slices are under way in a stage.

    ``remaining`` is the number of units that have yet to end.  On the last stage ``outputs`` are those of
    units, and ``latest`` is the loss of all that are known.  ``losses`` are those of the chains whose
    backward has begun, by their first units, and ``sums`` describe the gradient that such a chain got before
    all outputs were known.
    """

    remaining: int
    call: Call
    loss_function: Any = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    latest: _Loss | None = None
    losses: dict[int, _Loss] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)


class _Writable(torch.autograd.Function):
    """Hands on a leaf as a tensor that may be written to, as the output of a model may."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return gradient


class SlicedStage(ModelStage):
    """One chunk of the model, whose units are slices of a microbatch's sequences, or packs of short ones.

    The script's forward step runs once for each microbatch, with the first unit: it reads the whole batch,
    of which the model gets the unit's part.  The model is called with the same arguments for the others.  On
    the last stage the script's loss function gets the outputs of all units as one, so that losses, their
    normalization and what is reported are those of whole microbatches.

    Where a microbatch has several sequences, the backward of one may come before the forward of another.  The
    loss function then runs once for each, with zeros for outputs that are not known yet, and only the last
    call, which has all, is reported.  ``changes`` gets whether that call gives a sequence another gradient
    than the sequence had before: then the loss is no sum over sequences.
    """

    def __init__(
        self,
        *about: Any,
        units: Units,
        calls: list[Calls],
        knows_documents: bool = False,
        changes: list[torch.Tensor] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*about, **named)
        self._units, self._calls = units, calls[self._chunk]
        self._parts = Parts(units, getattr(self.inputs.groups, "cp", None))
        self._knows_documents = knows_documents
        self._microbatches: dict[int, _Microbatch] = {}
        self._sequences: dict[int, Sequence] = {}
        self._changes = changes

    def _slice(self, unit: int) -> tuple[_Microbatch, Slice]:
        entry, chain = self._units.units[unit], self._units.chain_of[unit]
        if entry.microbatch not in self._microbatches:
            count = len(self._units.of_microbatch[entry.microbatch])
            self._microbatches[entry.microbatch] = _Microbatch(count, Call(self._calls))
        if len(chain) > 1 and chain[0] not in self._sequences:
            length = self._units.documents[entry.microbatch][entry.pieces[0].document]
            self._sequences[chain[0]] = Sequence(Owner(self._stage, chain[0]), length)
        sizes = tuple(piece.end - piece.begin for piece in entry.pieces)
        part = Slice(
            self._sequences.get(chain[0]),
            entry.prefix,
            entry.prefix + sum(sizes),
            self._units.positions(unit),
            sum(self._units.documents[entry.microbatch]),
            sizes if self._knows_documents else (),
            self._parts.share(unit),
        )
        return self._microbatches[entry.microbatch], part

    def _forward(self, unit: int, activation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | int]:
        state, part = self._slice(unit)

        def forward_step(iterator: Any, model: Any) -> tuple[Any, None]:
            if state.call.arguments is not None:
                return model(**state.call.again()), None
            step = self.inputs.forward_step_func
            microbatch = self._units.units[unit].microbatch
            predicts = bool(getattr(self.inputs.config, "mtp_num_layers", None))
            with dealt_by(self._parts.dealing(microbatch, predicts)):
                output, state.loss_function = step_of_one_call(step, iterator, model, SLICE_FLAG)
            return output, None

        share, config = self._share(unit), self.inputs.config
        with calling(state.call), at_work_on(part), of_part(share), indexers_count(share, config, False):
            output, _ = self._stock_forward(forward_step, unit, activation, [])
        if part.sequence is not None:
            part.sequence.end_forward(part.end)
        if unit == self._units.of_microbatch[self._units.units[unit].microbatch][-1]:
            state.call.arguments = None  # the whole batch, of which backwards need nothing
        tokens: torch.Tensor | int = 0
        if self._is_last:
            state.outputs[unit] = output.detach()
            if output._base is not None:
                output = output.clone()  # Megatron does not free the numbers of a view
            if self._units.is_last(unit):
                tokens = self._loss(state, unit)
        if self.inputs.forward_only:
            self._end(unit, is_chain_over=self._units.is_last(unit))
        return output, tokens

    def _share(self, unit: int) -> float:
        entry = self._units.units[unit]
        return entry.tokens / sum(self._units.documents[entry.microbatch])

    def _loss(self, state: _Microbatch, unit: int) -> torch.Tensor | int:
        """Compute the loss of a microbatch of the known outputs; return its tokens if these are all."""
        microbatch = self._units.units[unit].microbatch
        whole = handed = self._whole(state, microbatch)
        if not self.inputs.forward_only:
            handed = _Writable.apply(whole.requires_grad_())
        has_all = len(state.outputs) == len(self._units.of_microbatch[microbatch])
        loss, tokens = self._stock_forward(
            lambda *_: (handed, state.loss_function), unit, None, self.inputs.losses if has_all else []
        )
        state.latest = _Loss(whole, loss, has_all)
        if not has_all:
            return 0
        state.outputs.clear()
        return tokens

    def _whole(self, state: _Microbatch, microbatch: int) -> torch.Tensor:
        """Return the outputs of a microbatch in the order of its tokens, with zeros for unknown ones."""
        numbers = self._units.of_microbatch[microbatch]
        outputs = [state.outputs.get(number) for number in numbers]
        like = next(output for output in outputs if output is not None)
        if len(self._units.documents[microbatch]) == 1 and not any(output is None for output in outputs):
            return torch.cat([output for output in outputs if output is not None], dim=1)
        tokens = self._parts.total(microbatch)
        whole = like.new_zeros(len(like), tokens, *like.shape[2:])
        for number, output in zip(numbers, outputs, strict=True):
            if output is not None:
                begin = 0
                for first, end in self._parts.ranges(number):
                    whole[:, first:end] = output[:, begin : begin + end - first]
                    begin += end - first
        return whole

    def _backward(self, unit: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        state, part = self._slice(unit)
        if self._is_last:
            gradient = self._part_of_gradient(state, unit, part)
        share, config = self._share(unit), self.inputs.config
        with at_work_on(part), of_part(share, config), indexers_count(share, config, True):
            of_input = super()._backward(unit, gradient)
        self._end(unit, is_chain_over=self._units.is_first(unit))
        return of_input

    def _end(self, unit: int, is_chain_over: bool) -> None:
        """Forget what slices share once their sequence ``is_chain_over``, and a microbatch at its end."""
        chain, microbatch = self._units.chain_of[unit][0], self._units.units[unit].microbatch
        state = self._microbatches[microbatch]
        state.remaining -= 1
        if is_chain_over:
            self._sequences.pop(chain, None)
            state.losses.pop(chain, None)
        if not state.remaining:
            del self._microbatches[microbatch]

    def _part_of_gradient(self, state: _Microbatch, unit: int, part: Slice) -> torch.Tensor:
        """Return the gradient of the outputs of ``unit``, by the latest loss when its chain goes backward."""
        chain = self._units.chain_of[unit]
        assert state.latest is not None
        of_chain = state.losses.setdefault(chain[0], state.latest)
        if of_chain.gradient is None:
            with self.at_work():
                of_chain.gradient = stock_schedules.backward_step(
                    of_chain.whole, of_chain.loss, None, self.inputs.config
                )
            assert of_chain.gradient is not None
            if of_chain.has_all and self._changes is not None:
                self._changes += [
                    _differ(sums, self._sums(of_chain.gradient, self._units.chain_of[first]))
                    for first, sums in state.sums.items()
                ]
        if not of_chain.has_all and chain[0] not in state.sums:
            state.sums[chain[0]] = self._sums(of_chain.gradient, chain)
        parts = [of_chain.gradient[:, begin:end] for begin, end in part.ranges_here]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def _sums(self, gradient: torch.Tensor, chain: range) -> torch.Tensor:
        """Return the sum and the norm of what ``gradient`` has for a ``chain``, and the rounding of both.

        Half of the digits of fp32 are for the sums within a loss function, whose order may change, and each
        number is rounded as gradients of its kind are.
        """
        parts = [gradient[:, begin:end] for unit in chain for begin, end in self._parts.ranges(unit)]
        sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts])
        norm, count = torch.linalg.vector_norm(norms), sum(part.numel() for part in parts)
        rounding = max(torch.finfo(torch.float32).eps ** 0.5, 2 * torch.finfo(gradient.dtype).eps)
        return torch.stack([sums.sum(), norm, rounding * count**0.5 * norm, rounding * norm])


def _differ(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return whether two gradients of the same tokens differ by more than rounding.

    Where the later one is not finite, loss scaling takes care of the step.
    """
    is_close = (before - after)[:2].abs() <= torch.maximum(before, after)[2:]
    return after.isfinite().all() & ~is_close.all()
