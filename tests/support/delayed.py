"""Training without a flush by the papers' formulas: one process that keeps every version of the weights."""

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from tests.support import training

_step, _finish = schedules.forward_step, schedules.backward_step


class Reference:
    """One pipeline rank with the whole model, which looks up the weights of every layer by their age.

    ``replicas`` are those of the stages, as in 2-1.  The ``rule`` is PipeDream's latest version, the same on
    all stages under vertical sync, or 2BW's previous.
    """

    def __init__(self, replicas: str, interval: int, rule: str) -> None:
        self.counts, self.interval, self.rule = [*map(int, replicas.split("-"))], interval, rule
        self.history: list[list[torch.Tensor]] = []

    def __call__(
        self, *, forward_step_func, data_iterator, model, num_microbatches, forward_only=False, **_
    ) -> list:
        (chunk,) = model
        config = get_model_config(chunk)
        self.layers = config.num_layers
        if forward_only:
            return _evaluate(forward_step_func, data_iterator, chunk, num_microbatches, config)
        parameters = training.global_parameters(model)
        home = [parameter.data for _, parameter in parameters]
        update = len(self.history)
        self.history.append([data.clone() for data in home])
        losses: list = []
        for microbatch in range(update * self.interval, (update + 1) * self.interval):
            for index, (name, parameter) in enumerate(parameters):
                parameter.data = self.weights(index, microbatch, self.stage_of(name))
            output, _ = _step(
                forward_step_func, data_iterator, chunk, num_microbatches, None, losses, config, 1,
                is_first_microbatch=False, current_microbatch=microbatch, is_last_stage=True,
            )  # fmt: skip
            _finish(None, output, None, config)
        for data, (_, parameter) in zip(home, parameters, strict=True):
            parameter.data = data
        config.finalize_model_grads_func(model, None)
        return losses

    def take_over(self) -> None:
        """Run the steps of this process."""
        training.training.get_forward_backward_func = lambda **_: self

    def weights(self, index: int, microbatch: int, stage: int) -> torch.Tensor:
        """Return parameter ``index`` as ``microbatch`` meets it on ``stage``."""
        return self.history[self.age(microbatch, stage)][index].clone()

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
