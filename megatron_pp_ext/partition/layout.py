"""Writes a partition as Megatron's --pipeline-model-parallel-layout.

A layout has one letter for each layer (E embedding, t transformer layer, L output layer and loss), ``*n``
after a letter that is repeated n times, and ``|`` between stages: ``Et*3|t*5|t*4L``.
"""

from megatron_pp_ext.partition.partitioner import Partition
from megatron_pp_ext.partition.profile import Profile
from megatron_pp_ext.request.layers import spelled


def has_layout(partition: Partition) -> bool:
    """Whether all stages have the same number of replicas, which are Megatron's data-parallel ranks."""
    return len(set(partition.replicas)) == 1


def layout_of(partition: Partition, profile: Profile) -> str:
    """Return the layout; ValueError for unequal replicas, and for a model that is not Megatron's."""
    if not has_layout(partition):
        raise ValueError(
            f"stages with {'-'.join(map(str, partition.replicas))} replicas have no layout, since Megatron "
            "gives all stages the same number of data-parallel ranks: compute a straight partition"
        )
    for layer in profile.layers:
        if layer.symbol not in ("E", "t", "L"):
            raise ValueError(
                f"layer {layer.name!r} has the symbol {layer.symbol!r}, but a layout consists of E, t and L: "
                "profile a Megatron model with mpp profile or --profile-pipeline"
            )
    return spelled(["".join(profile.layers[at].symbol for at in stage.layers) for stage in partition.stages])
