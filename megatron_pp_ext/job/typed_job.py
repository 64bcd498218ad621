"""A job as it is asked: a model, and how to train it.  It is read once; all that computes takes it.

``Job.of`` fills it from whatever has arguments under Megatron's names: those of a command line,
Megatron's own, those of a config (``job.model_config``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self

from megatron_pp_ext.job.attention_part import Attention
from megatron_pp_ext.job.memory_part import Memory
from megatron_pp_ext.job.parts import Batch, Model, Parallel
from megatron_pp_ext.job.pipeline_part import PipelinePart
from megatron_pp_ext.job.precision_part import Precision
from megatron_pp_ext.schedule import catalog


@dataclass(frozen=True)
class Job:
    """A model, and how it is trained.

    It and its parts have no slots, since a search changes jobs by the thousand, and a dictionary is copied at
    once.
    """

    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    pipeline: PipelinePart = field(default_factory=PipelinePart)

    @classmethod
    def of(cls, asked: object) -> Self:
        """Return the job that ``asked`` describes under the names of Megatron's arguments.

        What is absent or None has its default.  A job stays as it is.
        """
        if isinstance(asked, cls):
            return asked
        found = {name: getattr(asked, name, None) for name in _READ}
        return cls().changed(**{name: _plain(value) for name, value in with_derived(found).items()})

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

IMPLY = {"recompute_activations", "use_rotary_position_embeddings", "mtp_hybrid_override_pattern"}
"""Arguments that only give a field its value."""

_READ = (*PLACES, *OTHER_NAMES, *IMPLY)


def with_derived(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments ``given`` with what Megatron derives from others, for those that a job has."""
    found = {name: given.get(name) for name in PLACES}
    for other, name in OTHER_NAMES.items():
        found[name] = found[name] or given.get(other)
    pattern, predicting = found["hybrid_layer_pattern"] or "", given.get("mtp_hybrid_override_pattern")
    if pattern and predicting and "/" not in pattern:
        pattern += f"/{predicting}" * (found["mtp_num_layers"] or 0)
    if "/" in pattern:
        found.update(hybrid_layer_pattern=pattern, mtp_num_layers=pattern.count("/"))
    if given.get("recompute_activations"):
        found["recompute_granularity"] = "selective"
    how = found["recompute_granularity"], found["recompute_method"], found["recompute_num_layers"]
    if how == ("full", "block", 0):  # the first 0 layers of each stage
        found["recompute_granularity"] = None
    if given.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    if found["tensor_model_parallel_size"] == 1:
        found["sequence_parallel"] = False
    if isinstance(found["pipeline_schedule"], str):
        found["pipeline_schedule"] = catalog.canonical(found["pipeline_schedule"])
    return found


_PLAIN = (bool, int, float, str, tuple, Path)


def _plain(value: Any) -> Any:
    """Return ``value`` as a field has it: a tuple for a list, and words for what is of Megatron's types."""
    if isinstance(value, list):
        return tuple(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    return value.name if isinstance(value, Enum) else str(value)
