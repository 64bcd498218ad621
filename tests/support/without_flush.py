"""Training without a flush on Megatron, and the single process that keeps every version of the weights."""

import functools
from pathlib import Path

from tests.support import ranks, training

# isort: split
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_pp_ext import cpu
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners import choose
from tests.support.samples import note_samples

UNTIED = "--untie-embeddings-and-output-weights"
UPDATES = 20
# Two, three and four stages share twelve layers evenly.
MODEL = (UNTIED, "--num-layers", "12", "--train-iters", str(UPDATES), "--clip-grad", "0")
SGD, ADAM = ("--optimizer", "sgd", "--lr", "0.1"), ("--lr", "0.001")

_step, _finish = schedules.forward_step, schedules.backward_step


def pretrain(rank: int, argv: list[str], reference: tuple | None) -> dict:
    """Pre-train; return this rank's parameters at the end, its losses and what weight versions took."""
    chunks: list[torch.nn.Module] = []

    def initialize(model: list[torch.nn.Module]) -> None:
        training.initialize_by_layer(model)
        chunks.extend(model)

    if reference:
        one = Reference(*reference)
        training.training.get_forward_backward_func = lambda **_: one
    run = training._train(rank, argv, initialize, None)
    pipeline = requested.pipeline()
    versions = choose.runner(pipeline).most_version_bytes if pipeline else 0
    parameters = training.global_parameters(chunks)
    return {
        "parameters": {name: parameter.detach().float().clone() for name, parameter in parameters},
        "losses": run.losses,
        "validation": run.validation,
        "norms": run.grad_norms,
        "versions": versions / sum(parameter.nbytes for _, parameter in parameters),
    }


def run(world_size: int, flags: tuple[str, ...], reference: tuple | None = None) -> list[dict]:
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *flags])
    return ranks.run_ranks(pretrain, world_size, argv, reference)


class Reference:
    """One pipeline rank with the whole model, which looks up the weights of every layer by their age."""

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
        named = training.global_parameters(model)
        home = [parameter.data for _, parameter in named]
        update = len(self.history)
        self.history.append([data.clone() for data in home])
        losses: list = []
        for microbatch in range(update * self.interval, (update + 1) * self.interval):
            for index, (name, parameter) in enumerate(named):
                age = self.age(microbatch, self.stage_of(name))
                parameter.data = self.history[age][index].clone()
            output, _ = _step(
                forward_step_func, data_iterator, chunk, num_microbatches, None, losses, config, 1,
                is_first_microbatch=False, current_microbatch=microbatch, is_last_stage=True,
            )  # fmt: skip
            _finish(None, output, None, config)
        for data, (_, parameter) in zip(home, named, strict=True):
            parameter.data = data
        config.finalize_model_grads_func(model, None)
        return losses

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


def flags_of(replicas: str, interval: int, rule: str, data: int = 1) -> tuple[str, ...]:
    """Return the flags of a pipeline with these replicas of its stages, as in 1-1 or 2-1."""
    names = {
        "latest": ("pipedream", "--pipeline-update-interval", str(interval)),
        "same": ("pipedream", "--pipeline-update-interval", str(interval), "--pipeline-vertical-sync"),
        "previous": ("pipedream-2bw",),
    }
    stages = replicas.split("-")
    sizes = ("--pipeline-model-parallel-size", str(len(stages)), "--global-batch-size", str(interval * data))
    replicated = () if {*stages} == {"1"} else ("--pipeline-replicas", replicas)
    return (*sizes, *replicated, "--pipeline-schedule", *names[rule])


@functools.cache
def reference(replicas: str, interval: int, rule: str, flags: tuple[str, ...]) -> dict:
    """Parameters by name, and losses, of one process that follows the papers' formulas."""
    return run(1, (*MODEL, *flags, "--global-batch-size", str(interval)), (replicas, interval, rule))[0]


def noted(rank: int, argv: list[str], file: str, dies_at: int | None) -> dict:
    """Pre-train; note this rank's samples in ``file``.RANK, and die before step ``dies_at``."""
    note_samples(Path(f"{file}.{rank}"))
    if dies_at is not None:
        stock = training.training.train_step

        def train_step(*args, **kwargs):
            if training.training.get_args().curr_iteration == dies_at:
                raise KeyboardInterrupt("killed")
            return stock(*args, **kwargs)

        training.training.train_step = train_step
    return pretrain(rank, argv, None)
