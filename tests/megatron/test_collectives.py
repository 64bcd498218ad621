"""Which collectives of a rehearsal are recorded, under Megatron's way of running a rank alone."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_pp_ext.megatron.runners.rehearsing import CollectiveRecorder
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective
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
            dist.all_gather([*whole], part, group=context)
            dist.reduce_scatter(part, [*whole], group=context)
            dist.all_to_all([*whole], [*whole.clone()], group=context)
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
            *2 * (("gather", 160, 4, 2), ("gather", 160, 4, 2), ("all_to_all", 160, 4, 2)),
        )
    ]


COMPILE = """
import torch
from megatron_pp_ext.megatron.runners.rehearsing import CollectiveRecorder
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import v

compiled = called = 0

def backend(graph, inputs):
    global compiled
    compiled += 1
    def run(*inputs):
        global called
        called += 1
        return graph(*inputs)
    return run

@torch.compile(backend=backend)
def activation(rows):
    return torch.sigmoid(rows) * rows

steps = StepRecorder()
collectives = CollectiveRecorder(v(2), steps)
for step in range(2):
    with steps.step(metered=step == 0):
        for microbatch in range(2):
            with (steps if step else collectives).during(Action(0, Kind.F, microbatch)):
                activation(torch.ones(4, requires_grad=True))
            print(compiled, called)
"""


@pytest.mark.wide
def test_what_training_compiles_is_compiled() -> None:
    """From the first microbatch on, so that nothing is compiled, or left uncompiled, while it is timed.

    The script runs by itself, since the stand-ins for a GPU do not let torch compile.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["1 1", "1 2", "1 3", "1 4"], run.stderr
