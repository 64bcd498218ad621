"""Training without a flush by the papers' formulas: one process that keeps every version of the weights."""

import functools
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from tests.support import training

_step, _finish = schedules.forward_step, schedules.backward_step


class NAdam(torch.optim.NAdam):
    """Torch's NAdam, made as Megatron makes its Adam."""

    def __init__(self, params: Any, capturable: bool, **settings: Any) -> None:
        super().__init__(params, decoupled_weight_decay=True, **settings)


class Reference:
    """One pipeline rank with the whole model, which looks up the weights of every layer by their age.

    ``replicas`` are those of the stages, as in 2-1.  The ``rule`` is PipeDream's latest version, the same on
    all stages under vertical sync, or 2BW's previous.
    """

    def __init__(self, replicas: str, interval: int, rule: str, correction: str | None = None) -> None:
        self.counts, self.interval, self.rule = [*map(int, replicas.split("-"))], interval, rule
        self.correction = correction
        self.history: list[list[torch.Tensor]] = []

    def __call__(
        self, *, forward_step_func, data_iterator, model, num_microbatches, forward_only=False, **_
    ) -> list:
        (chunk,) = model
        config = get_model_config(chunk)
        self.layers = config.num_layers
        if forward_only:
            return _evaluate(forward_step_func, data_iterator, chunk, num_microbatches, config)
        named = training.global_parameters(model)
        home = [parameter.data for _, parameter in named]
        update = len(self.history)
        self.history.append([data.clone() for data in home])
        losses: list = []
        for microbatch in range(update * self.interval, (update + 1) * self.interval):
            for index, (name, parameter) in enumerate(named):
                parameter.data = self.weights(index, microbatch, self.stage_of(name))
            output, _ = _step(
                forward_step_func, data_iterator, chunk, num_microbatches, None, losses, config, 1,
                is_first_microbatch=False, current_microbatch=microbatch, is_last_stage=True,
            )  # fmt: skip
            _finish(None, output, None, config)
        for data, (_, parameter) in zip(home, named, strict=True):
            parameter.data = data
        config.finalize_model_grads_func(model, None)
        return losses

    def take_over(self) -> None:
        """Run the steps of this process, with torch's own optimizers for Nesterov's correction."""
        training.training.get_forward_backward_func = lambda **_: self
        if self.correction == "nesterov":
            optimizer.SGD = functools.partial(torch.optim.SGD, nesterov=True)
            torch.optim.AdamW = NAdam  # the name by which Megatron finds its Adam

    def weights(self, index: int, microbatch: int, stage: int) -> torch.Tensor:
        """Return parameter ``index`` as ``microbatch`` meets it on ``stage``."""
        age = self.age(microbatch, stage)
        now = self.history[age][index]
        if self.correction != "error-feedback" or age == 0:
            return now.clone()
        return torch.add(now, now - self.history[age - 1][index], alpha=self.longest_delay(stage))

    def longest_delay(self, stage: int) -> int:
        """Return how many updates late a gradient of ``stage`` comes at most."""
        late = range(10 * self.interval, 11 * self.interval)  # the pipeline is full
        return max(microbatch // self.interval - self.age(microbatch, stage) for microbatch in late)

    def stage_of(self, name: str) -> int:
        if name.startswith("embedding."):
            return 0
        if name.startswith("decoder.layers."):
            return (int(name.split(".")[2]) - 1) * len(self.counts) // self.layers
        return len(self.counts) - 1

    def age(self, microbatch: int, stage: int) -> int:
        """Count the updates of the stage before the forward of the replica whose turn it is."""
        if self.rule == "previous":
            return max(0, microbatch // self.interval - 1)
        stage = stage if self.rule == "latest" else 0
        count = self.counts[stage]
        warm_up = (sum(self.counts[stage:]) - 1) // count
        return max(0, (microbatch // count - warm_up) // (self.interval // count))


def _evaluate(forward_step_func, data_iterator, chunk, microbatches: int, config) -> list:
    losses: list = []
    for microbatch in range(microbatches):
        _step(
            forward_step_func, data_iterator, chunk, microbatches, None, losses, config, 1,
            is_first_microbatch=False, current_microbatch=microbatch, is_last_stage=True,
        )  # fmt: skip
    return losses
