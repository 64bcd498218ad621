"""The types of models that are known, and how the keys of each become Megatron's arguments.

``model_types.toml`` has them, and those that Megatron's flags do not describe.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pp_ext.planner.hugging_face import attention_keys as attention
from megatron_pp_ext.planner.hugging_face import expert_keys as mlp
from megatron_pp_ext.planner.hugging_face import family_keys as family
from megatron_pp_ext.planner.hugging_face import hybrid_keys as hybrid
from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import Keys, unknown_key

FILE = Path(__file__).with_name("model_types.toml")


@dataclass(frozen=True, slots=True)
class ModelType:
    """``parts`` read the keys; ``fixed`` are the arguments that all models of the type have.

    ``defaults`` are values of keys that a file may leave out.  ``notes`` are sentences on what the
    arguments leave out, since Megatron's flags have no words for it.
    """

    parts: tuple[Callable[[Keys], Arguments], ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def read(self, values: Mapping[str, Any]) -> tuple[Arguments, Keys]:
        """Return the arguments that ``values``, the content of a config.json, describe, and the keys read.

        ValueError for a value that is wrong and for a key that nothing knows.
        """
        keys = Keys(values, self.defaults)
        keys.notes += self.notes
        arguments: Arguments = {}
        for part in self.parts:
            arguments |= part(keys)
        arguments |= self.fixed
        # Transformers 4 wrote this key of all its models into nested configurations.
        keys.require("add_cross_attention", False, "Megatron's GPT has no cross-attention")
        for name, value in keys.unused().items():
            raise ValueError(unknown_key(name, value))
        return arguments, keys


_FUNCTIONS = {**vars(attention), **vars(mlp), **vars(family), **vars(hybrid)}


def _parts(words: str) -> Iterator[Callable[[Keys], Arguments]]:
    """Yield the functions that ``words`` name, or the groups of them."""
    for word in words.split():
        if word in _TABLE["groups"]:
            yield from _parts(_TABLE["groups"][word])
        else:
            yield _FUNCTIONS[word]


_TABLE = tomllib.loads(FILE.read_text(encoding="utf-8"))

TYPES: Mapping[str, ModelType] = {
    name: ModelType(**{**about, "parts": tuple(_parts(about["parts"]))})
    for name, about in _TABLE["types"].items()
}
"""The types by their names."""

SAME: Mapping[str, str] = _TABLE["same"]
"""Types whose language model is another type's."""

REFUSED = {name: reason for reason, names in _TABLE["refused"].items() for name in names.split()}
"""Why Megatron's flags describe no model of other types."""
