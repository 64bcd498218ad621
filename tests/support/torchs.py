"""The schedule classes of torch.distributed.pipelining as schedules of this project."""

import re

import pytest

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.placement import linear, loop, v

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

TORCH = {
    "ScheduleGPipe": ("gpipe", linear),
    "Schedule1F1B": ("1f1b", linear),
    "ScheduleLoopedBFS": ("breadth-first", lambda p: loop(p, 2)),
    "ScheduleInterleaved1F1B": ("interleaved", lambda p: loop(p, 2)),
    "ScheduleInterleavedZeroBubble": ("interleaved-zb", lambda p: loop(p, 2)),
    "ScheduleZBVZeroBubble": ("v-zb", v),
    "ScheduleDualPipeV": ("dualpipe-v", v),
}


def torch_schedule(name, placement, microbatches):
    """Return torch's own order for the same sizes; its pairs (OVERLAP_F_B) run one after the other."""
    # No more of an instance than its order looks at: a whole one needs a process group and a model.
    instance = object.__new__(getattr(schedules, name))
    ranks, chunks = placement.ranks, placement.chunks
    instance.pp_group_size = ranks
    instance._n_microbatches = microbatches
    instance._num_stages = instance.num_stages = ranks * chunks
    instance._stages, instance.n_local_stages = [None] * chunks, chunks
    instance.number_of_rounds = max(1, microbatches // ranks)
    instance.microbatches_per_round = microbatches // instance.number_of_rounds
    if hasattr(instance, "_calculate_single_rank_operations"):
        rows = [instance._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        rows = [instance._get_pipeline_order()[rank] for rank in range(ranks)]
    orders = [
        [
            Action(int(match[1]), Kind(match[2]), int(match[3]))
            for action in filter(None, row)
            for part in action.sub_actions or (action,)
            if (match := re.fullmatch(r"(\d+)([FIWB])(\d+)", str(part)))
        ]
        for row in rows
    ]
    if name == "Schedule1F1B":
        # torch 2.15 numbers the forwards of the last rank from 1.
        orders[-1] = [a._replace(microbatch=i // 2) for i, a in enumerate(orders[-1])]
    schedule = Schedule(name, placement, microbatches, tuple(map(tuple, orders)))
    check(schedule)
    return schedule
