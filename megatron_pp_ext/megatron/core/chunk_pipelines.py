"""The pipeline that a model was built for, where a process has several, and the check of its layers."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import Checks
from megatron_pp_ext.megatron import patching, requested
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.schedule.placement import Placement

_chunks: WeakKeyDictionary[torch.nn.Module, Pipeline | None] = WeakKeyDictionary()
"""The pipeline of every chunk that was built since hooks are in place; None of one for stock's schedule."""

_arrivals: list[str] = []
"""The schedules for which configs were made that came from other processes."""

_MARK = "_megatron_pp_ext_pipeline"


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The pipeline of the models that are built from a config; stock's schedule where it has no name.

    A chunk is known by itself, so that its steps find their runner whatever is installed when they run.  A
    config carries a mark, so that functions which are asked about its layers answer for its placement.  A
    mark that was copied into another process, inside the config, has no pipeline there: whoever trains with
    that config learns that a schedule was asked for.
    """

    pipeline: Pipeline | None
    name: str
    is_built: bool = False

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether the config was made in another process."""
        return self.pipeline is None and bool(self.name)

    def __deepcopy__(self, memo: Any) -> "Mark":
        return Mark(self.pipeline, self.name)

    def __reduce__(self) -> tuple[Callable[[str], "Mark"], tuple[str]]:
        return _arrived, (self.name,)


def arrived(name: str) -> Mark:
    """Return the mark of a process that its config was copied into; ``of_model`` refuses its steps."""
    _arrivals.append(name)
    return Mark(None, name)


_arrived: Callable[[str], Mark] = arrived


def arrive_by(function: Callable[[str], Mark]) -> None:
    """Let ``function`` make the marks of copied configs: what sees to it that their steps ask ``of_model``.

    The process that a config is copied into imports the function's module, and nothing else.
    """
    global _arrived
    _arrived = function


@hook(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "self",
    "the checks and the pipeline of the models of a config",
)
def mark_config(stock: Checks, config: Any) -> None:
    """Mark a config that is made while a pipeline of its own is in force, once it has passed its checks."""
    for feature in FEATURES:
        stock = feature.config_checks(stock)
    stock(config)
    pipeline = requested.pipeline()
    if pipeline is not None and pipeline.is_per_model:
        setattr(config, _MARK, Mark(pipeline, pipeline.name))
        patching.apply_imported()  # whatever builds a model is imported by now


def claim(config: Any, pipeline: Pipeline | None) -> None:
    """Let functions about the layers of ``config`` answer for ``pipeline``, or for stock's placement.

    Called before a model is built.  ValueError where the config has a model for another pipeline: nobody
    could find whose layers are meant.
    """
    mark = getattr(config, _MARK, None)
    is_alone = pipeline is None and not any(_chunks.values())
    if is_alone or (pipeline is None and mark is not None and mark.is_from_elsewhere):
        return  # a step of the latter refuses it
    name = pipeline.name if pipeline else ""
    if mark is not None and mark.is_built and mark.pipeline is not pipeline:
        first, second = (owner or "Megatron's own schedule" for owner in (mark.name, name))
        raise ValueError(
            f"this config has a model for {first} and is to have one for {second}, whose layers are on other "
            "ranks; build each from a config of its own, such as a deep copy"
        )
    setattr(config, _MARK, Mark(pipeline, name, is_built=True))


def remember(chunk: torch.nn.Module, pipeline: Pipeline | None) -> None:
    """Note the pipeline that ``chunk`` was built for; None where it was built for stock's schedule."""
    _chunks[chunk] = pipeline


def of_config(config: Any) -> Pipeline | None:
    """Return the pipeline of the models of ``config``; the one in force where nothing is known of it."""
    mark = getattr(config, _MARK, None)
    if mark is None or mark.is_from_elsewhere:
        return requested.pipeline()
    return mark.pipeline


def of_model(model: Sequence[torch.nn.Module]) -> Pipeline | None:
    """Return the pipeline that the steps of ``model`` run by, or None for stock's.

    ValueError where the model's config was made for a schedule in another process.
    """
    parts = (part for chunk in model for part in chunk.modules() if part in _chunks)
    part = next(parts, None) if _chunks else None
    if part is not None and _chunks[part] is not None:
        return _chunks[part]
    pipeline = requested.pipeline() if part is None else None
    if pipeline is None and _arrivals:
        _refuse_arrived(model)
    return pipeline


def _refuse_arrived(model: Sequence[torch.nn.Module]) -> None:
    for part in (part for chunk in model for part in chunk.modules()):
        mark = getattr(getattr(part, "config", None), _MARK, None)
        if mark is not None and mark.is_from_elsewhere:
            raise ValueError(
                f"this model's config was made for schedule {mark.name} in another process, and none is "
                "installed in this one, which would run Megatron's own; call megatron_pp_ext.install here "
                "before the model is built"
            )


def part_of(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model of megatron.core inside of ``chunk``, or what is inside of all wrappers."""
    match = next((part for part in chunk.modules() if part in _chunks), None)
    if match is not None:
        return match
    return unwrap_model(chunk)


def built_for(pipeline: Pipeline) -> int:
    """Return how many chunks of models that are still there were built for ``pipeline``."""
    return sum(other is pipeline for other in _chunks.values())


def forget() -> None:
    """Forget all models, before stock's schedule runs again.

    ValueError while one is left whose layers are not where that schedule expects them.
    """
    for pipeline in _chunks.values():
        if pipeline is not None and pipeline.moves_stages:
            raise ValueError(
                f"a model that was built for {pipeline.name} is still there, and Megatron's own schedule "
                "would train it wrongly; delete it and what refers to it first"
            )
    _chunks.clear()


def finish(chunks: Sequence[Any]) -> None:
    """Let all features change all ``chunks`` of this rank."""
    pipeline = requested.require()
    for feature in FEATURES:
        feature.finish_chunks(chunks, pipeline)


def finishing(build_chunk: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_chunk`` such that the call that builds the last chunk finishes all of them.

    Megatron's own trainer exchanges tied weights right after that call.
    """
    models: list[Any] = []

    @functools.wraps(build_chunk)
    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_chunk(*args, **kwargs)
        models.append(model)
        if len(models) == requested.require().placement.chunks:
            finish(models)
            models.clear()
        return model

    return build


_LAYER = re.compile(r"decoder\.layers\.\d+")


class Built(NamedTuple):
    """The layers of a chunk by number, from 1, and whether it has the embedding and the output head."""

    layers: tuple[int, ...]
    embeds: bool
    has_head: bool


def require_as_placed(model: Sequence[torch.nn.Module], pipeline: Pipeline, group: dist.ProcessGroup) -> None:
    """Raise ValueError, on all ranks of the pipeline ``group``, unless all have the stages of the placement.

    ``model`` are the chunks of this rank.  Collective over ``group``.

    A builder that goes round the functions which are placed would put other layers on a rank than the
    schedule runs there, and train another model without an error.
    """
    gathered: list[list[Built]] = [[]] * group.size()
    dist.all_gather_object(gathered, [built(chunk) for chunk in model], group=group)
    problem = misplaced(gathered, pipeline.placement)
    if problem:
        raise ValueError(f"{pipeline.name} cannot train this model: {problem}")


def built(chunk: torch.nn.Module) -> Built:
    """Return the layers of ``chunk``, under any wrappers."""
    part: Any = part_of(chunk)
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
