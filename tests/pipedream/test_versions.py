"""Flush-free pipelines on plain torch stages against a single process that keeps every version."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.pipedream.flush_free import VersionedStage, WeightVersions
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import Owner
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas, WeightVersion
from tests.support import plain_stages, rounding
from tests.support.module_stage import ModuleStage
from tests.support.plain_stages import make_module, microbatch_data
from tests.support.ranks import run_ranks
from tests.support.split_linear import SplitLinear
from tests.support.tiers import first

UPDATES = 20
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
CASES = [
    ("1-1-1", 1, WeightVersion.LATEST),
    ("1-1-1-1", 2, WeightVersion.LATEST),
    ("1-1-1", 1, WeightVersion.SAME),
    ("1-1-1-1", 3, WeightVersion.SAME),
    ("1-1", 2, WeightVersion.PREVIOUS),
    ("1-1-1-1", 4, WeightVersion.PREVIOUS),
    ("2-1", 2, WeightVersion.LATEST),
    ("1-2-1", 2, WeightVersion.LATEST),
    ("1-2", 2, WeightVersion.SAME),
    ("2-1", 4, WeightVersion.PREVIOUS),
]


def loss(output: torch.Tensor, microbatch: int) -> torch.Tensor:
    return (output - microbatch_data(-microbatch - 1)).square().mean()


def train_pipeline(
    rank: int, replicas: Replicas, interval: int, weights: WeightVersion, optimizer: str
) -> dict:
    """Train one stage, or a replica of it, for all updates; tell its parameters and what versions took."""
    dist.init_process_group("gloo")
    groups = [dist.new_group(list(replicas.ranks_of(stage))) for stage in range(replicas.stages)]
    number = replicas.stage_of(rank)
    inner = plain_stages.make_stage(number, replicas.stages, loss)
    module = inner.module
    versions = WeightVersions(module.parameters())
    about = {"stage": number, "replicas": replicas, "interval": interval}
    stage = VersionedStage(inner, versions, partial(pipedream.version, weights, **about))
    channels = plain_stages.make_channels(replicas.ranks)
    steps = OPTIMIZERS[optimizer](module.parameters())
    kept_bytes = 0
    for update in range(UPDATES):
        steps.zero_grad()
        orders = pipedream.step(replicas, interval, update, UPDATES)
        plan = plan_orders(replicas.placed(orders), rank, flushes=False)
        execute(plan, Rank({number: stage}, channels))
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=groups[number])
        versions.update_follows(pipedream.versions_kept(weights, update + 1, **about))
        steps.step()
        kept_bytes = max(kept_bytes, versions.kept_bytes)
    channels.close()
    return {
        "parameters": [parameter.detach().clone() for parameter in module.parameters()],
        "versions": kept_bytes / sum(parameter.nbytes for parameter in module.parameters()),
    }


def train_alone(counts, interval, weights, optimizer):
    """The same by the formula: every version of every stage is kept, and looked up by its age."""
    modules = [make_module(stage) for stage in range(len(counts))]
    steps = [OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    history = [[[p.detach().clone() for p in module.parameters()]] for module in modules]
    for update in range(UPDATES):
        for one in steps:
            one.zero_grad()
        for microbatch in range(update * interval, (update + 1) * interval):
            activation = microbatch_data(microbatch)
            for stage, module in enumerate(modules):
                put(module, history[stage][age_of(weights, microbatch, stage, counts, interval)])
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


def age_of(weights: WeightVersion, microbatch: int, stage: int, counts: list[int], interval: int) -> int:
    """The papers' rules in words: how many updates the weights had seen that a microbatch meets."""
    own_update = microbatch // interval
    if weights is WeightVersion.PREVIOUS:
        return max(own_update - 1, 0)
    # A replica's forward comes in before its backward that is as many behind as its warm-up has forwards.
    stage = stage if weights is WeightVersion.LATEST else 0
    warm_up = (sum(counts[stage:]) - 1) // counts[stage]
    return max(0, (microbatch // counts[stage] - warm_up) // (interval // counts[stage]))


@pytest.mark.parametrize("optimizer", first(1, OPTIMIZERS))
@pytest.mark.parametrize(("written", "interval", "weights"), CASES)
def test_parameters_after_twenty_updates(written, interval, weights, optimizer) -> None:
    counts = [int(count) for count in written.split("-")]
    replicas = Replicas(tuple(counts))
    trained = run_ranks(train_pipeline, replicas.ranks, replicas, interval, weights, optimizer)
    expected = train_alone(counts, interval, weights, optimizer)
    for rank, one in enumerate(trained):
        for ours, theirs in zip(one["parameters"], expected[replicas.stage_of(rank)], strict=True):
            if interval <= 2 or replicas.is_straight:
                assert torch.equal(ours, theirs)  # two gradients have one sum
            else:
                rounding.assert_gradients_close(ours, theirs)
    for rank, one in enumerate(trained):
        assert one["versions"] == most_versions(weights, replicas.stage_of(rank), counts, interval)


def most_versions(weights: WeightVersion, stage: int, counts: list[int], interval: int) -> int:
    """What the papers say, beside the newest: n - s - 1 for PipeDream, one for 2BW."""
    if weights is WeightVersion.PREVIOUS:
        return 1
    stage = stage if weights is WeightVersion.LATEST else 0
    warm_up = (sum(counts[stage:]) - 1) // counts[stage]
    return -(-warm_up * counts[stage] // interval)


def test_frozen_weights_have_no_versions() -> None:
    """They never change; copies of them would take memory for nothing."""
    layer = torch.nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    versions = WeightVersions(layer.parameters())
    assert versions.bytes_of_one == layer.bias.nbytes
    versions.update_follows([0])
    assert versions.kept_bytes == layer.bias.nbytes


class Parts(torch.nn.Module):
    """Uses its square weight as it is, transposed, and by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.double))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.weight).sin() @ self.weight.t() @ self.weight[2:].t() @ self.weight[:2, 1:]


def test_a_part_of_a_weight_is_that_of_its_version() -> None:
    """The optimizer writes between forward and backward; both meet the weights of the forward."""
    module, rows = Parts(), torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    module(rows).square().sum().backward()
    expected = module.weight.grad, rows.grad
    module.weight.grad = rows.grad = None
    versions = WeightVersions(module.parameters())
    with versions.using(0):
        output = module(rows).square().sum()
    versions.update_follows([0])
    with torch.no_grad():
        module.weight.mul_(2)
    newest = module.weight.clone()
    with versions.using(0):
        output.backward()
    assert torch.equal(module.weight.grad, expected[0]) and torch.equal(rows.grad, expected[1])
    assert torch.equal(module.weight, newest)


def test_both_halves_of_a_backward_meet_the_forwards_version() -> None:
    torch.manual_seed(0)
    layer = SplitLinear(4, 4)
    versions = WeightVersions(layer.parameters())
    stage = VersionedStage(ModuleStage(1, layer), versions, lambda microbatch: 0)
    gradient = torch.randn(3, 4)
    expected = gradient @ layer.weight.detach()
    stage.forward(0, torch.randn(3, 4))
    versions.update_follows([0])
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(stage.backward_input(0, gradient), expected)
    stage.backward_weight(0)


def test_activations_are_counted_beside_versions() -> None:
    layer = torch.nn.Linear(4, 4)
    versions, meter = WeightVersions(layer.parameters()), ActivationMeter(layer.parameters())
    rows = torch.randn(3, 4, requires_grad=True)
    with meter.forward(Owner(0, 0)), versions.using(0):
        output = layer(rows)
    assert (meter.live_bytes, meter.live_microbatches) == (rows.nbytes, 1)
    with versions.using(0):
        output.sum().backward()
    assert meter.live_bytes == 0


def test_the_newest_weights_come_back_after_an_error() -> None:
    layer = torch.nn.Linear(4, 4)
    versions = WeightVersions(layer.parameters())
    versions.update_follows([0])
    with torch.no_grad():
        layer.weight.mul_(2)
    newest = layer.weight.clone()
    with pytest.raises(ArithmeticError), versions.using(0):
        assert not torch.equal(layer.weight, newest)
        raise ArithmeticError
    assert torch.equal(layer.weight, newest)
