"""Layers with experts whose products and exchanges of tokens take time on a device that sleeps.

Megatron's own layers run, of a tiny model, and compute what they always do.  Beside that each product with a
weight, and each exchange of tokens, takes the seconds that ``Times`` has, on the stream where it is launched.
``costs`` has the simulator's costs of these.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.training import training

from benchmarks.runtime import device
from megatron_pp_ext.costs.model_parts import overlapped
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.costs import Costs

RANKS, EXPERT_RANKS, MICROBATCHES, LAYERS = 4, 2, 16, 8
WORLD = RANKS * EXPERT_RANKS
CHUNKS = LAYERS // RANKS
"""The most that a rank has: one layer each."""

PRODUCT = 0.012
"""Seconds of a product with a weight in a forward; its two gradients take as long each."""

AROUND_ATTENTION, OF_EXPERTS = 2, 4
"""Products of a layer on a rank, which has two experts."""

SHARES = (0.1, 0.2, 0.3)
"""The part of a layer's forward and backward that its four exchanges of tokens take."""

VOCABULARY = 100
"""No other weight has so many rows."""

FLAGS = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers {LAYERS} --expert-model-parallel-size "
    f"{EXPERT_RANKS} --global-batch-size {EXPERT_RANKS * MICROBATCHES} --num-experts 4 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --disable-bias-linear --bf16 "
    f"--vocab-size {VOCABULARY}"
)


class Times(NamedTuple):
    """Seconds of a product with a weight, and of an exchange of tokens."""

    product: float = 0.0
    exchange: float = 0.0

    @classmethod
    def of(cls, share: float) -> "Times":
        """Return the times where exchanges take ``share`` of a layer."""
        products = 3 * (AROUND_ATTENTION + OF_EXPERTS) * PRODUCT
        return cls(PRODUCT, products * share / (1 - share) / 4)


def costs(times: Times, chunks: int) -> Costs:
    """Return the costs of stages, and of a pair by the plan of a layer; nothing is fitted."""
    around, of_experts = AROUND_ATTENTION * times.product, OF_EXPERTS * times.product
    attention = Part(forward_seconds=around, input_gradient_seconds=around, weight_gradient_seconds=around)
    experts = Part(
        forward_seconds=of_experts + 2 * times.exchange,
        input_gradient_seconds=of_experts + 2 * times.exchange,
        weight_gradient_seconds=of_experts,
        exchanged_seconds=times.exchange,
    )
    rank = (attention + experts).times(LAYERS // RANKS)
    of_stages = Costs.per_rank(
        RANKS,
        chunks,
        forward=rank.forward_seconds,
        input_gradient=rank.input_gradient_seconds,
        weight_gradient=rank.weight_gradient_seconds,
    )
    unpaired = attention.forward_seconds + attention.backward_seconds
    unpaired += experts.forward_seconds + experts.backward_seconds
    return replace(of_stages, pair=1 - overlapped(attention, experts) / unpaired)


class Step(NamedTuple):
    """A step as one rank saw it: when it began and when its gradients were complete, in seconds."""

    start: float
    end: float


class Clock:
    """Gives the steps of a job their times, one after the other, and notes when they begin and end."""

    def __init__(self, times: Sequence[Times]) -> None:
        self._left = list(times)
        self.now = Times()
        self.steps: list[Step] = []

    def install(self) -> None:
        """Put the device and the times into this process, in which no model has been built."""
        device.install()
        training.train_step = self.timed(training.train_step)
        dist.all_to_all_single = self.exchanging(dist.all_to_all_single)
        name = "LinearWithGradAccumulationAndAsyncCommunication"
        setattr(layers, name, self.multiplying(getattr(layers, name)))

    def timed(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's ``train_step``; gradients are reduced and used when the clock has stopped."""

        def step(forward_step_func: Any, data: Any, model: Any, *arguments: Any, **options: Any) -> Any:
            optimizer, scheduler, config, forward_backward_func, *remaining = arguments
            finalize = config.finalize_model_grads_func

            def stop(*args: Any, **kwargs: Any) -> Any:
                device.synchronize()
                self.steps[-1] = Step(self.steps[-1].start, time.perf_counter())
                self.now = Times()
                return finalize(*args, **kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                dist.barrier()
                self.now = self._left.pop(0)
                self.steps.append(Step(time.perf_counter(), 0.0))
                config.finalize_model_grads_func = stop
                try:
                    return forward_backward_func(*args, **kwargs)
                finally:
                    config.finalize_model_grads_func = finalize

            return train_step(
                forward_step_func, data, model, optimizer, scheduler, config, run, *remaining, **options
            )

        return step

    def exchanging(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``all_to_all_single``; the tokens take the time, and their probabilities none."""

        def exchanged(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = exchange(output, *args, **kwargs)
            if output.dim() > 1:
                device.current_stream().run(self.now.exchange)
            return result

        return exchanged

    def multiplying(self, stock: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
        """Derive from Megatron's linear function one whose products of layers take their time."""
        clock = self

        class Multiplication(stock):  # type: ignore[valid-type,misc]
            @staticmethod
            def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> Any:
                ctx.takes_time = len(weight) != VOCABULARY  # the output layer takes none
                if ctx.takes_time:
                    device.current_stream().run(clock.now.product)
                return stock.forward(ctx, input, weight, *arguments)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                if ctx.takes_time:
                    device.current_stream().run(clock.now.product)
                    # At once where no schedule has a place of its own for it.
                    STORE.defer(lambda: device.current_stream().run(clock.now.product))
                return stock.backward(ctx, *gradients)

        return Multiplication
