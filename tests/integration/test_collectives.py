"""Which collectives of a rehearsal are recorded, under Megatron's way of running a rank alone."""

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pp_ext.integration.runners.collectives import CollectiveRecorder
from megatron_pp_ext.planner.collective import Collective
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import v
from tests.support.ranks import run_ranks


def record(rank: int) -> tuple[list[Collective], int]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    tensor_parallel = dist.new_group([0, 1])
    context = dist.new_group([0, 2, 4, 6], group_desc="CONTEXT_PARALLEL_GROUP")
    replicas = dist.new_group([0, 4], group_desc="DATA_PARALLEL_GROUP_WITH_CP")
    alone = dist.new_group([0])
    steps = StepRecorder()
    collectives = CollectiveRecorder(v(2), steps)
    part, whole = torch.zeros(10), torch.zeros(4, 10)
    for action in (Action(0, Kind.F, 0), Action(3, Kind.I, 0), Action(0, Kind.F, 1)):
        with collectives.during(action):
            for group in (tensor_parallel, replicas, alone):
                dist.all_reduce(part, group=group)
            dist.all_gather_into_tensor(whole.view(-1), part, group=context)
            dist.reduce_scatter_tensor(part, whole.view(-1), group=context)
            dist.all_to_all_single(whole, whole.clone(), group=context)
    return collectives.found, len(steps.record.events)


def test_collectives_of_the_first_microbatch() -> None:
    """Each action's messages count, with the larger side's bytes; those of replicas do not."""
    ((found, actions),) = run_ranks(record, 1)
    assert actions == 3
    assert found == [
        Collective(chunk, kind, operation, size, members, stride)
        for chunk, kind in ((0, "F"), (1, "I"))
        for operation, size, members, stride in (
            ("all_reduce", 40, 2, 1),
            ("gather", 160, 4, 2),
            ("gather", 160, 4, 2),
            ("all_to_all", 160, 4, 2),
        )
    ]
