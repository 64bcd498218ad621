"""Stages that sleep for a given time and compute nothing, so that two cores can host eight ranks.

Our executor, stock Megatron's and torch's schedulers all run the same module.  Its backward has two parts
that each of them can run separately: one node of the autograd graph sleeps for I, another for W.
"""

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement

_TRIES = 25


@dataclass(frozen=True)
class Times:
    """Seconds of a whole stage's F, I and W, and the bytes of a message."""

    forward: float
    input_gradient: float
    weight_gradient: float
    message_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a message (sequence, batch, hidden) in fp32."""
        return self.message_bytes // 4096, 1, 1024

    def costs(self, placement: Placement, hop: float = 0.0) -> Costs:
        """Return the costs of the stages of ``placement``; a message takes ``hop`` seconds."""
        seconds = {
            "forward": self.forward,
            "input_gradient": self.input_gradient,
            "weight_gradient": self.weight_gradient,
        }
        return Costs.per_rank(placement.ranks, placement.chunks, hop=hop, **seconds)


class _SleepInput(torch.autograd.Function):
    """Sleeps for I, counted from when the backward reached the layer."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, layer: "SleepingLayer") -> torch.Tensor:
        ctx.layer = layer
        return torch.empty_like(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = torch.empty_like(gradients[0])
        ctx.layer.sleep(ctx.layer.times.input_gradient)
        return gradient, None


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, layer: "SleepingLayer") -> torch.Tensor:
        ctx.seconds = layer.times.weight_gradient / layer.chunks
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Deferred to a W under our schedules only; otherwise it sleeps at once.
        STORE.defer(lambda: time.sleep(ctx.seconds))
        return gradients[0], None


class _Join(torch.autograd.Function):
    """Joins an activation and a weight without arithmetic, whose cost would grow with the message."""

    @staticmethod
    def forward(
        ctx: Any, activation: torch.Tensor, weight: torch.Tensor, layer: "SleepingLayer"
    ) -> torch.Tensor:
        ctx.layer = layer
        # The same storage, but no view: Megatron frees outputs, and refuses to where they are views.
        joined = activation.new_empty(0).set_(activation)
        layer.sleep(layer.times.forward)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.layer.since = time.perf_counter()
        return gradients[0], gradients[0].new_zeros(1), None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.like = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.empty_like(ctx.like)


class SleepingLayer(torch.nn.Module):
    """One of the ``chunks`` chunks of a stage; ``calibrated`` gives the times for which it sleeps."""

    def __init__(self, times: Times, chunks: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.times, self.chunks = times, chunks
        self.given: torch.Tensor | None = None
        self.since = 0.0

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Keep the input of the next forward; Megatron calls this where a stage does not read data."""
        self.given = tensors[0]

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Sleep for F and return a tensor of the same shape."""
        self.since = time.perf_counter()
        if not activation.requires_grad:
            activation.requires_grad_()
        weight = _SleepWeight.apply(self.weight, self)
        return _Join.apply(_SleepInput.apply(activation, self), weight, self)

    def sleep(self, seconds: float) -> None:
        """Sleep until a chunk's share of a stage's ``seconds`` is over, counted from ``since``."""
        time.sleep(max(0.0, self.since + seconds / self.chunks - time.perf_counter()))


def loss_of(output: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return zero, whose gradient takes no time."""
    result: torch.Tensor = _Loss.apply(output)
    return result


class SleepingStage:
    """A ``runtime.rank.Stage`` that sleeps, with neither a module nor autograd."""

    def __init__(self, times: Times, chunks: int) -> None:
        self._times, self._chunks = times, chunks

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Sleep for F."""
        return self._after(self._times.forward)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Sleep for B."""
        return self._after(self._times.input_gradient + self._times.weight_gradient)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Sleep for I."""
        return self._after(self._times.input_gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for W."""
        time.sleep(self._times.weight_gradient / self._chunks)

    def _after(self, seconds: float) -> torch.Tensor:
        time.sleep(seconds / self._chunks)
        return torch.empty(self._times.shape)


def calibrated(times: Times, chunks: int) -> Times:
    """Return the times for which a layer must sleep so that F, I and W, with autograd, take ``times``.

    One layer is measured alone, with the pauses that it has in a pipeline: code that has just slept runs
    several times slower than code in the caches.  Other ranks must not run meanwhile, because waiting for a
    core would be measured as autograd's time.
    """
    layer, slot = SleepingLayer(times, chunks), Owner(0, 0)
    tries: list[tuple[float, float, float]] = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        output = layer(torch.empty(times.shape, requires_grad=True))
        forward = time.perf_counter()
        with STORE.collecting(slot):
            torch.autograd.backward(output, grad_tensors=torch.empty(times.shape))
        input_gradient = time.perf_counter()
        STORE.run(slot)
        tries.append((forward - start, input_gradient - forward, time.perf_counter() - input_gradient))
    targets = (times.forward, times.input_gradient, times.weight_gradient)
    shorter = (
        max(0.0, 2 * seconds - chunks * median(measured))
        for seconds, measured in zip(targets, zip(*tries, strict=True), strict=True)
    )
    return replace(times, **dict(zip(("forward", "input_gradient", "weight_gradient"), shorter, strict=True)))
