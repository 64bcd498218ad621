"""Flush-free pipelines on plain torch stages against a single process that keeps every version."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.versions import VersionedStage, WeightVersions
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Weights
from tests.support import plain_stages
from tests.support.plain_stages import make_module, microbatch_data
from tests.support.ranks import run_ranks

UPDATES = 20
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
CASES = [
    (2, 1, Weights.LATEST),
    (3, 1, Weights.LATEST),
    (4, 1, Weights.LATEST),
    (4, 2, Weights.LATEST),
    (3, 1, Weights.SAME),
    (4, 3, Weights.SAME),
    (2, 2, Weights.PREVIOUS),
    (4, 4, Weights.PREVIOUS),
    (3, 5, Weights.PREVIOUS),
]


def loss(output: torch.Tensor, microbatch: int) -> torch.Tensor:
    return (output - microbatch_data(-microbatch - 1)).square().mean()


def train_pipeline(rank: int, ranks: int, interval: int, weights: Weights, optimizer: str) -> dict:
    """Train one stage for all updates; tell its parameters and what its versions took."""
    dist.init_process_group("gloo")
    inner = plain_stages.make_stage(rank, ranks, loss)
    module = inner.module
    versions = WeightVersions(module.parameters())
    version_of = partial(pipedream.version, weights, stage=rank, ranks=ranks, interval=interval)
    stage = VersionedStage(inner, versions, version_of)
    channels = plain_stages.make_channels(ranks)
    steps = OPTIMIZERS[optimizer](module.parameters())
    kept_bytes = 0
    for update in range(UPDATES):
        steps.zero_grad()
        plan = plan_rank(pipedream.step(ranks, interval, update, UPDATES), rank)
        execute(plan, {rank: stage}, channels, flush=False)
        versions.update_follows(pipedream.versions_kept(weights, update + 1, rank, ranks, interval))
        steps.step()
        kept_bytes = max(kept_bytes, versions.kept_bytes)
    channels.close()
    return {
        "parameters": [parameter.detach().clone() for parameter in module.parameters()],
        "versions": kept_bytes / sum(parameter.nbytes for parameter in module.parameters()),
    }


def train_alone(ranks: int, interval: int, weights: Weights, optimizer: str) -> list[list[torch.Tensor]]:
    """The same by the formula: every version of every stage is kept, and looked up by its age."""
    modules = [make_module(stage) for stage in range(ranks)]
    steps = [OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    history = [[[p.detach().clone() for p in module.parameters()]] for module in modules]
    for update in range(UPDATES):
        for one in steps:
            one.zero_grad()
        for microbatch in range(update * interval, (update + 1) * interval):
            activation = microbatch_data(microbatch)
            for stage, module in enumerate(modules):
                put(module, history[stage][age_of(weights, microbatch, stage, ranks, interval)])
                activation = module(activation)
            loss(activation, microbatch).backward()
        for stage, module in enumerate(modules):
            put(module, history[stage][-1])
            steps[stage].step()
            history[stage].append([p.detach().clone() for p in module.parameters()])
    return [stage[-1] for stage in history]


def put(module: torch.nn.Module, weights: list[torch.Tensor]) -> None:
    for parameter, numbers in zip(module.parameters(), weights, strict=True):
        parameter.data = numbers.clone()


def age_of(weights: Weights, microbatch: int, stage: int, ranks: int, interval: int) -> int:
    """The papers' rules in words: how many updates the weights had seen that a microbatch meets."""
    own_update = microbatch // interval
    if weights is Weights.PREVIOUS:
        return max(own_update - 1, 0)
    # A forward comes in before the backward of the microbatch that is as far ahead as the stages behind.
    behind = ranks - 1 - (stage if weights is Weights.LATEST else 0)
    return max(0, (microbatch - behind) // interval)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "interval", "weights"), CASES)
def test_parameters_after_twenty_updates(ranks, interval, weights, optimizer) -> None:
    trained = run_ranks(train_pipeline, ranks, ranks, interval, weights, optimizer)
    expected = train_alone(ranks, interval, weights, optimizer)
    for rank, parameters in enumerate(expected):
        for ours, theirs in zip(trained[rank]["parameters"], parameters, strict=True):
            assert torch.equal(ours, theirs)
    expected_versions = [most_versions(weights, stage, ranks, interval) for stage in range(ranks)]
    assert [one["versions"] for one in trained] == expected_versions


def most_versions(weights: Weights, stage: int, ranks: int, interval: int) -> int:
    """What the papers say, beside the newest: n - s - 1 for PipeDream, one for 2BW."""
    behind = ranks - 1 - stage
    if weights is Weights.LATEST:
        return -(-behind // interval)
    if weights is Weights.PREVIOUS:
        return 1
    return -(-(ranks - 1) // interval)
