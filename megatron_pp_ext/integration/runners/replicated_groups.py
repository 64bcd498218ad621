"""Megatron's process groups for a pipeline whose stages have different numbers of replicas.

Megatron's ``parallel_state`` knows one data-parallel size for all stages.  Its models and its
``DistributedDataParallel`` do not: they ask the process-group collection that they are given, and
so two groups make them work in a pipeline of replicated stages (``schedule.families.round_robin``).
"""

import copy

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.schedule.families.round_robin import Replicas


def process_groups(replicas: Replicas, base: ProcessGroupCollection) -> ProcessGroupCollection:
    """The collection of this rank: ``base`` with a pipeline group and data-parallel groups by stage.

    In the pipeline group, ``pp``, every stage has one seat, and this rank sits in its own stage's: its
    rank there is its stage.  The data-parallel groups are all replicas of the stage.  Collective over
    the whole world, which must be ``replicas.ranks`` large; ValueError if it is not.
    """
    if dist.get_world_size() != replicas.ranks:
        raise ValueError(
            f"replicas {'-'.join(map(str, replicas.counts))} take {replicas.ranks} ranks, but the job has "
            f"{dist.get_world_size()}; start as many"
        )
    rank = dist.get_rank()
    groups = copy.copy(base)
    for other in range(replicas.ranks):
        seats = [replicas.first_rank(stage) for stage in range(replicas.stages)]
        seats[replicas.stage_of(other)] = other
        seated = dist.new_group(seats, group_desc="SEATS")
        if other == rank:
            groups.pp = seated
    for stage in range(replicas.stages):
        together = dist.new_group(list(replicas.ranks_of(stage)), group_desc="REPLICAS")
        if rank in replicas.ranks_of(stage):
            groups.dp = groups.dp_cp = groups.intra_dp_cp = together
    return groups
