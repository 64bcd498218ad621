"""Whether a model was built as the placement has it, looked at before its first step.

A builder that goes round the functions which are placed would put other layers on a rank than the schedule
runs there, and train another model without an error.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.integration.core import chunk_pipelines
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.schedule.placement import Placement

_LAYER = re.compile(r"decoder\.layers\.\d+")


class Built(NamedTuple):
    """The layers of a chunk by number, from 1, and whether it has the embedding and the output head."""

    layers: tuple[int, ...]
    embeds: bool
    has_head: bool


def require_as_placed(model: Sequence[torch.nn.Module], pipeline: Pipeline, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on all ranks of the pipeline ``group``, unless all have the stages of the placement.

    ``model`` are the chunks of this rank.  Collective over ``group``.
    """
    gathered: list[list[Built]] = [[]] * group.size()
    dist.all_gather_object(gathered, [built(chunk) for chunk in model], group=group)
    problem = misplaced(gathered, pipeline.placement)
    if problem:
        raise ValueError(f"{pipeline.name} cannot train this model: {problem}")


def built(chunk: torch.nn.Module) -> Built:
    """Return the layers of ``chunk``, under any wrappers."""
    part: Any = chunk_pipelines.part_of(chunk)
    layers = tuple(numbers_of_layers(part).values())
    return Built(layers, *(bool(getattr(part, end, False)) for end in ("pre_process", "post_process")))


def numbers_of_layers(part: torch.nn.Module) -> dict[str, int]:
    """Return the number in the model, counted from 1, of each layer of ``part`` by its name there."""
    return {
        name: module.layer_number
        for name, module in part.named_modules()
        if _LAYER.fullmatch(name) and hasattr(module, "layer_number")
    }


def misplaced(gathered: Sequence[Sequence[Built]], placement: Placement) -> str:
    """Return why the chunks of each rank are not the placement's stages; empty if they are."""
    for rank, chunks in enumerate(gathered):
        if len(chunks) != placement.chunks:
            return (
                f"it has {placement.chunks} chunks a rank, and rank {rank} of the pipeline asks for a step "
                f"with {len(chunks)}; pass the list of all chunks as model, or, where a trainer takes one, "
                "choose a schedule with one chunk a rank, such as 1f1b or zb-h1"
            )
    expected = 1
    for stage in range(placement.stages):
        rank, chunk = placement.rank_of(stage), placement.chunk_of(stage)
        built = gathered[rank][chunk]
        position = f"chunk {chunk} of pipeline rank {rank} is stage {stage}"
        layers = tuple(range(expected, expected + len(built.layers)))
        if built.layers != layers:
            has = ", ".join(map(str, built.layers))
            return f"{position}, which has to begin with layer {expected}, and has layers {has}; {_FIX}"
        expected += len(built.layers)
        for end, has_end, at in (
            ("embedding", built.embeds, 0),
            ("output layer", built.has_head, placement.stages - 1),
        ):
            if has_end is not (stage == at):
                return f"{position}, and {'has' if has_end else 'lacks'} the model's {end}; {_FIX}"
    return ""


_FIX = (
    "let its builder give vp_stage to Megatron's model class and layer functions, install the schedule "
    "before the model is built, or choose a schedule with one chunk a rank, such as 1f1b or zb-h1"
)
