"""Megatron's process groups for a pipeline whose stages have different numbers of replicas.

Megatron's ``parallel_state`` has one data-parallel size for all stages.  Its models and its
``DistributedDataParallel`` make no such assumption: they use the process-group collection that they are
given, and with two groups of its own in it a pipeline of replicated stages
(``schedule.families.round_robin``) works.
"""

import copy

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.schedule.families.round_robin import Replicas


def process_groups(replicas: Replicas, base: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the collection of this rank: ``base`` with a pipeline group and data-parallel groups by stage.

    The pipeline group, ``pp``, has one rank of every stage, with this rank for its own stage, so its rank
    there is its stage.  The data-parallel groups consist of all replicas of the stage.  Collective over the
    whole world, which must have ``replicas.ranks`` ranks; ValueError if it has not.
    """
    if dist.get_world_size() != replicas.ranks:
        raise ValueError(
            f"replicas {'-'.join(map(str, replicas.counts))} take {replicas.ranks} ranks, but the job has "
            f"{dist.get_world_size()}; start as many"
        )
    rank = dist.get_rank()
    groups = copy.copy(base)
    for other in range(replicas.ranks):
        members = [replicas.first_rank(stage) for stage in range(replicas.stages)]
        members[replicas.stage_of(other)] = other
        pipeline = dist.new_group(members, group_desc="REPLICATED_PIPELINE")
        if other == rank:
            groups.pp = pipeline
    for stage in range(replicas.stages):
        together = dist.new_group(list(replicas.ranks_of(stage)), group_desc="REPLICAS")
        if rank in replicas.ranks_of(stage):
            groups.dp = groups.dp_cp = groups.intra_dp_cp = together
    return groups
