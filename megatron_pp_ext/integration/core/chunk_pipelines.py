"""Which pipeline a model was built for, where a process has several models and not all have the same one.

A chunk is known by itself, so that its steps find their runner whatever is installed when they run.  A config
carries a mark, so that functions which are asked about its layers answer for its placement.  A mark that was
copied into another process, inside the config, has no pipeline there: whoever trains with that config learns
that a schedule was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import Checks
from megatron_pp_ext.integration import patching, requested
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.requested import Pipeline

_chunks: WeakKeyDictionary[torch.nn.Module, Pipeline | None] = WeakKeyDictionary()
"""The pipeline of every chunk that was built since hooks are in place; None of one for stock's schedule."""

_arrivals: list[str] = []
"""The schedules for which configs were made that came from other processes."""

_MARK = "_megatron_pp_ext_pipeline"


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The pipeline of the models that are built from a config; stock's schedule where it has no name."""

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
    """Return what a mark is in a process that its config was copied into; ``of_model`` refuses its steps."""
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
    could tell whose layers are meant.
    """
    mark = getattr(config, _MARK, None)
    is_alone = pipeline is None and not any(_chunks.values())
    if is_alone or (pipeline is None and mark is not None and mark.is_from_elsewhere):
        return  # a step of the latter refuses it
    name = pipeline.name if pipeline else ""
    if mark is not None and mark.is_built and mark.pipeline is not pipeline:
        first, second = (one or "Megatron's own schedule" for one in (mark.name, name))
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
    known = (part for chunk in model for part in chunk.modules() if part in _chunks)
    part = next(known, None) if _chunks else None
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
    known = next((part for part in chunk.modules() if part in _chunks), None)
    if known is not None:
        return known
    return unwrap_model(chunk)


def built_for(pipeline: Pipeline) -> int:
    """Return how many chunks of models that are still there were built for ``pipeline``."""
    return sum(one is pipeline for one in _chunks.values())


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
