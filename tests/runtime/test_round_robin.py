"""Replicated stages on plain torch stages: the gradients of one process, routed in turn."""

import pytest
import torch.distributed as dist

from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.families import round_robin
from megatron_pp_ext.schedule.families.round_robin import Replicas
from tests.support import plain_stages, rounding
from tests.support.ranks import run_ranks

MICROBATCHES = 8


def run_replica(rank: int, replicas: Replicas) -> dict:
    """Run one step and add up the gradients of the stage's replicas."""
    dist.init_process_group("gloo")
    stage = replicas.stage_of(rank)
    runs = plain_stages.make_stage(stage, replicas.stages)
    parameters = list(runs.module.parameters())
    groups = [dist.new_group(list(replicas.ranks_of(one))) for one in range(replicas.stages)]
    channels = plain_stages.make_channels(replicas.ranks)
    orders = round_robin.orders(replicas, MICROBATCHES)
    recorder = StepRecorder(parameters)
    with recorder.step():
        plan = plan_orders(orders, replicas.stages, replicas.rank_of, rank)
        execute(plan, Rank({stage: runs}, channels, recorder))
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=groups[stage])
    return {
        "gradients": [parameter.grad for parameter in parameters],
        "order": [event.action for event in recorder.record.events],
        "peak": recorder.record.peak_microbatches,
        "losses": runs.losses,
    }


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 2, 1)])
def test_gradients_are_those_of_one_process(counts: tuple[int, ...]) -> None:
    replicas = Replicas(counts)
    ranks = run_ranks(run_replica, replicas.ranks, replicas)
    gradients, losses = plain_stages.in_one_process(replicas.stages, MICROBATCHES)
    orders = round_robin.orders(replicas, MICROBATCHES)
    reported: dict[int, float] = {}
    for rank, result in enumerate(ranks):
        stage = replicas.stage_of(rank)
        for ours, theirs in zip(result["gradients"], gradients[stage], strict=True):
            rounding.assert_gradients_close(ours, theirs, terms=MICROBATCHES * plain_stages.ROWS)
        assert result["order"] == list(orders[rank])
        assert result["peak"] <= replicas.warm_up(stage) + 1
        reported |= result["losses"]
    assert reported == losses
