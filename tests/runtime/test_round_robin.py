"""Replicated stages on plain torch stages: the gradients of one process, routed in turn."""

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.module_stage import ModuleStage
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.families import round_robin
from megatron_pp_ext.schedule.families.round_robin import Replicas
from tests.runtime.test_executor import ROWS, WIDTH, loss, make_module, microbatch_data
from tests.support import rounding
from tests.support.ranks import run_ranks

MICROBATCHES = 8


def run_replica(rank: int, replicas: Replicas) -> dict:
    """Run one step and add up the gradients of the stage's replicas."""
    dist.init_process_group("gloo")
    stage = replicas.stage_of(rank)
    module = make_module(stage)
    runs = ModuleStage(
        stage,
        module,
        first_inputs=microbatch_data if stage == 0 else None,
        loss=loss if stage == replicas.stages - 1 else None,
    )
    groups = [dist.new_group(list(replicas.ranks_of(one))) for one in range(replicas.stages)]
    everyone = list(range(replicas.ranks))
    channels = Channels(
        everyone, *direction_groups(everyone), (ROWS, WIDTH), torch.double, torch.device("cpu")
    )
    orders = round_robin.orders(replicas, MICROBATCHES)
    recorder = StepRecorder(module.parameters())
    with recorder.step():
        execute(
            plan_orders(orders, replicas.stages, replicas.rank_of, rank), {stage: runs}, channels, recorder
        )
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=groups[stage])
    return {
        "gradients": [parameter.grad for parameter in module.parameters()],
        "order": [event.action for event in recorder.record.events],
        "peak": recorder.record.peak_microbatches,
        "losses": runs.losses,
    }


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 2, 1)])
def test_gradients_are_those_of_one_process(counts: tuple[int, ...]) -> None:
    replicas = Replicas(counts)
    ranks = run_ranks(run_replica, replicas.ranks, replicas)

    modules = [make_module(stage) for stage in range(replicas.stages)]
    losses = {}
    for microbatch in range(MICROBATCHES):
        value = loss(torch.nn.Sequential(*modules)(microbatch_data(microbatch)), microbatch)
        value.backward()
        losses[microbatch] = value.item()

    orders = round_robin.orders(replicas, MICROBATCHES)
    told: dict[int, float] = {}
    for rank, result in enumerate(ranks):
        stage = replicas.stage_of(rank)
        for ours, theirs in zip(result["gradients"], modules[stage].parameters(), strict=True):
            rounding.assert_gradients_close(ours, theirs.grad, terms=MICROBATCHES * ROWS)
        assert result["order"] == list(orders[rank])
        assert result["peak"] <= replicas.warm_up(stage) + 1
        told |= result["losses"]
    assert told == losses
