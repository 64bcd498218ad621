"""A job as it is asked: a model, and how to train it.  It is read once; all that computes takes it.

``Job.of`` fills it from whatever has arguments under Megatron's names: those of a command line,
Megatron's own, those of a config (``job.model_config``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from megatron_pp_ext.job.parts import Batch, Memory, Model, Parallel, Pipeline, Precision
from megatron_pp_ext.schedule import catalog


@dataclass(frozen=True)
class Job:
    """A model, and how it is trained.

    It and its parts have no slots, since a search changes jobs by the thousand, and a dictionary is copied at
    once.
    """

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    pipeline: Pipeline = field(default_factory=Pipeline)

    @classmethod
    def of(cls, asked: object, **others: Any) -> Self:
        """Return the job that ``asked`` describes under the names of Megatron's arguments.

        ``others`` come first.  What is absent or None has its default.
        """
        if isinstance(asked, cls):
            return asked.changed(**others)
        found = {name: _plain(value) for name in _READ if (value := getattr(asked, name, None)) is not None}
        return cls().changed(**_settled(found), **others)

    def changed(self, **values: Any) -> Self:
        """Return a job with other ``values``, None for a default; the parts that they leave alone are shared.

        KeyError for a name that no part has.
        """
        by_part: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            part, default = PLACES[name]
            if part not in by_part:
                by_part[part] = {}
            by_part[part][name] = default if value is None else value
        return _replaced(self, {part: _replaced(getattr(self, part), own) for part, own in by_part.items()})

    def value(self, name: str) -> Any:
        """Return the value of the field ``name``, in whatever part it is."""
        return getattr(getattr(self, PLACES[name][0]), name)

    @property
    def padded_vocabulary(self) -> int:
        """The rows of the embedding, padded as Megatron does for tensor-parallel ranks to share them."""
        model = self.model
        if model.padded_vocab_size or not model.pad_vocab_size:
            return model.padded_vocab_size or model.vocab_size
        multiple = model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return math.ceil(model.vocab_size / multiple) * multiple


def _replaced[One](one: One, values: Mapping[str, Any]) -> One:
    """Return ``one``, a dataclass, with other ``values``, sooner than ``dataclasses.replace`` does."""
    made = object.__new__(type(one))
    vars(made).update(vars(one), **values)
    return made


PLACES: Mapping[str, tuple[str, Any]] = {
    one.name: (name, one.default) for name, part in vars(Job()).items() for one in fields(part)
}
"""The part that each field is in, and its default."""

OTHER_NAMES = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "hybrid_override_pattern": "hybrid_layer_pattern",
}
"""Arguments that mean the same as a field, where that one is absent."""

IMPLY = {"recompute_activations", "use_rotary_position_embeddings"}
"""Arguments that only give a field its value."""

_READ = (*PLACES, *OTHER_NAMES, *IMPLY)


def _settled(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that follow from the arguments ``found``, as Megatron derives them."""
    for name, meant in OTHER_NAMES.items():
        other = found.pop(name, None)
        found[meant] = found.get(meant) or other
    if found.pop("recompute_activations", False):
        found.setdefault("recompute_granularity", "selective")
    if found.pop("use_rotary_position_embeddings", False):
        found["position_embedding_type"] = "rope"
    if found.get("tensor_model_parallel_size") == 1:
        found["sequence_parallel"] = False
    if isinstance(found.get("pipeline_schedule"), str):
        found["pipeline_schedule"] = catalog.canonical(found["pipeline_schedule"])
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` as a field has it: a tuple for a list, and words for what is of Megatron's types."""
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str | tuple | Path) else str(value)
