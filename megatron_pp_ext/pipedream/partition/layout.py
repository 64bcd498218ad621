"""Writes a partition as Megatron's flags: --pipeline-model-parallel-layout, and --pipeline-replicas.

A layout has one letter for each layer (E embedding, t transformer layer, L output layer and loss), ``*n``
after a letter that is repeated n times, and ``|`` between stages: ``Et*3|t*5|t*4L``.
"""

from megatron_pp_ext.job.layout_text import spelled
from megatron_pp_ext.pipedream.partition.partitioner import Partition
from megatron_pp_ext.schedule.formats.profile import Profile

_SYMBOLS = ("E", "t", "L")


def is_megatrons(profile: Profile) -> bool:
    """Whether every layer is one that a layout has a letter for."""
    return all(layer.symbol in _SYMBOLS for layer in profile.layers)


def layout_of(partition: Partition, profile: Profile) -> str:
    """Return the layout; ValueError for a model that is not Megatron's."""
    for layer in profile.layers:
        if layer.symbol not in _SYMBOLS:
            raise ValueError(
                f"layer {layer.name!r} has the symbol {layer.symbol!r}, but a layout consists of E, t and L: "
                "profile a Megatron model with mpp profile or --profile-pipeline"
            )
    return spelled(["".join(profile.layers[at].symbol for at in stage.layers) for stage in partition.stages])


def replicas_flag(partition: Partition) -> str:
    """Return the flag for the replicas of the stages; empty where Megatron's data parallelism is enough.

    Data parallelism gives all stages the same number of replicas.
    """
    counts = partition.replicas
    return f"--pipeline-replicas {'-'.join(map(str, counts))}" if len(set(counts)) > 1 else ""


def training_flags(partition: Partition, profile: Profile) -> str:
    """Return the flags that train a partition, without the model's flags.

    ValueError for one stage, which is no pipeline, and for a model that is not Megatron's.
    """
    if len(partition.stages) == 1:
        raise ValueError(
            "one stage with all workers is the best cut, for which there are no flags: train it with data "
            "parallelism alone"
        )
    sizes = f"--pipeline-model-parallel-size {len(partition.stages)}"
    layout = f"--pipeline-model-parallel-layout '{layout_of(partition, profile)}'"
    return " ".join(filter(None, ("--pipeline-schedule pipedream", sizes, layout, replicas_flag(partition))))
