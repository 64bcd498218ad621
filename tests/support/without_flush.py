"""Training without a flush on Megatron, and the single process that follows the papers' formulas."""

import functools
from pathlib import Path

from tests.support import ranks, training

# isort: split
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners import choose
from tests.support.delayed import Reference
from tests.support.samples import note_samples

UNTIED = "--untie-embeddings-and-output-weights"
UPDATES = 6
"""Two more than the longest delay here."""
# Two, three and four stages share twelve layers evenly.
MODEL = (UNTIED, "--num-layers", "12", "--train-iters", str(UPDATES), "--clip-grad", "0")
SGD, ADAM = ("--optimizer", "sgd", "--lr", "0.1"), ("--lr", "0.001")


def pretrain(rank: int, argv: list[str], reference: tuple | None) -> dict:
    """Pre-train; return this rank's parameters at the end, its losses and the bytes of weight versions."""
    chunks: list[torch.nn.Module] = []

    def initialize(model: list[torch.nn.Module]) -> None:
        training.initialize_by_layer(model)
        chunks.extend(model)

    if reference:
        Reference(*reference).take_over()
    run = training._train(rank, argv, initialize, None)
    pipeline = requested.pipeline()
    versions = choose.runner(pipeline).steps.most_version_bytes if pipeline else 0
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
    sizes = ("--global-batch-size", str(interval))
    return run(1, (*MODEL, *flags, *sizes), (replicas, interval, rule))[0]


def assert_same_parameters(ranks: list[dict], *expected: dict) -> None:
    """All of them to the last bit: the ones of ``expected``, one run or one for each rank."""
    parameters = {name: value for run in expected for name, value in run["parameters"].items()}
    assert {name for rank in ranks for name in rank["parameters"]} == parameters.keys()
    for rank in ranks:
        for name, value in rank["parameters"].items():
            assert torch.equal(value, parameters[name]), name


def loaded_by_stock(folder: Path, *flags: str) -> list[dict]:
    """The weights of two ranks of stock after they have loaded the checkpoint of a pipeline of two."""
    stock = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "1", "--load", str(folder))
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *MODEL, *flags, *stock])
    return ranks.run_ranks(pretrain, 2, argv, None)


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
