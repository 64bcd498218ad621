"""The content of a config.json as Megatron's arguments, by the types of models that are known.

``model_types.toml`` has them, and those that Megatron's flags do not describe.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pp_ext.json_input import did_you_mean, short
from megatron_pp_ext.planner.hugging_face import attention_keys as attention
from megatron_pp_ext.planner.hugging_face import expert_keys as mlp
from megatron_pp_ext.planner.hugging_face import family_keys as family
from megatron_pp_ext.planner.hugging_face.attention_keys import Arguments
from megatron_pp_ext.planner.hugging_face.config_keys import BY_FLAGS, Keys, unknown_key

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


_FUNCTIONS = {**vars(attention), **vars(mlp), **vars(family)}


def _parts(words: str) -> Iterator[Callable[[Keys], Arguments]]:
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


LONGEST_DEFAULT = 8192
"""The sequence length where nobody gives one: the model's number of positions, but at most so many tokens."""

_NAMES = {
    "model_type",
    "architectures",
    "transformers_version",
    "num_hidden_layers",
    "n_layer",
    "text_config",
}
"""Names of which every config.json has some, and which none of Megatron's arguments has."""

_NESTED = "text_config", "llm_config", "language_config", "thinker_config"
"""Where a model of several kinds of input describes its language model."""

_OF_MODEL = {"model_type", "num_hidden_layers", *_NESTED}
"""Keys of which such a description has some."""

_OF_ALL = "tie_word_embeddings", "pad_token_id", "quantization_config"
"""Keys of a language model that may stand next to it."""

_OTHER_FILES = {
    "peft_type": "of an adapter",
    "weight_map": "of a checkpoint's weights",
    "tokenizer_class": "of a tokenizer",
    "image_processor_type": "of a processor of images",
    "do_sample": "of the generation of text",
    "_diffusers_version": "of a diffusion model",
}
"""The contents of other files of Hugging Face, by a key that each of them has."""

_BASE = "base_model_name_or_path"

_HEADLESS = re.compile(
    r"For(?:\w*Classification|\w*Reward\w*|QuestionAnswering|MultipleChoice|\w*Retrieval|\w*Embedding\w*)$"
    r"|RewardModel$|(?:BidirectionalModel|EmbedModel|EncoderModel)$|^(?!.*(?:LMHead|Chat|VL))\w*Model$"
)
"""Matches classes whose output is no token: rewards, classes, spans of a text, hidden states."""

_INPUTS = "vision_config", "audio_config", "vision_feature_layer", "spatial_merge_size"
"""Keys of the encoders of other inputs, where they stand among the language model's."""


@dataclass(frozen=True, slots=True)
class GivenModel:
    """The model ``name`` in Megatron's arguments, and ``notes``: sentences on parts that are left out.

    Up to ``longest`` tokens a sequence is trained as the model would; None without a bound.
    """

    name: str
    values: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    longest: int | None = None
    assumed: frozenset[str] = frozenset()
    """The names of values that are not the model's, and stand in for what a job has to have."""


def is_config(content: Mapping[str, Any]) -> bool:
    """Whether ``content`` is that of a config.json, and not an object of Megatron's arguments."""
    return not _NAMES.isdisjoint(content)


def read(config: Mapping[str, Any]) -> GivenModel:
    """Return the model of ``config``, the content of a config.json.

    ValueError for types and keys that are not known, for wrong values, and for missing keys.
    """
    language, notes = _language_model(config)
    values, keys = TYPES[_known(language.get("model_type"), config.get("model_type"))].read(language)
    _require_language_head(language.get("architectures") or config.get("architectures"), language)
    positions = values["max_position_embeddings"]
    assumed = {
        "seq_length": positions and min(positions, LONGEST_DEFAULT, keys.longest or LONGEST_DEFAULT),
        "tokenizer_type": "NullTokenizer",
        "bf16": True,
    }
    name, notes = str(config.get("model_type")), notes + keys.notes
    return GivenModel(name, values | assumed, notes, keys.longest, frozenset(assumed))


def refuse_other_files(content: Mapping[str, Any]) -> None:
    """Raise ValueError for the ``content`` of a file of Hugging Face that describes no model."""
    subject = next((subject for key, subject in _OTHER_FILES.items() if key in content), None)
    if subject is None or "model_type" in content or "architectures" in content:
        return
    base = content.get(_BASE)
    about = f" ({short(content['peft_type'])})" if "peft_type" in content else ""
    model = f"its base model, {base}" if isinstance(base, str) and base else "the model"
    raise ValueError(f"is the file {subject}{about}, not of a model: give the config.json of {model}")


def _require_language_head(architectures: object, language: Mapping[str, Any]) -> None:
    """Raise ValueError for a model whose output is not the vocabulary, as a reward model's."""
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if not isinstance(name, str) or not _HEADLESS.search(name):
            continue
        names, count = language.get("id2label"), language.get("num_labels")
        labels = count if count is not None else len(names) if isinstance(names, Mapping) else 2
        plural = "" if labels == 1 else "s"
        head = (
            f"a head of {labels} label{plural}" if "Classification" in name else "no head of the vocabulary"
        )
        raise ValueError(
            f"architectures has {short(name)}, with {head}, and Megatron's GPT has one of the vocabulary: "
            "take architectures out of a copy of the file to count it as a language model"
        )


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the part of ``config`` that describes the language model, and a note where there is more."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping) and not _OF_MODEL.isdisjoint(inner):
            outer = {key: config[key] for key in (*_OF_ALL, "model_type") if key in config}
            description, _ = _language_model({**outer, **inner})
            without = "its encoders and its talker" if name == "thinker_config" else "its encoders"
            return description, [f"the language model alone is described ({name}), without {without}"]
    if any(name in config for name in _INPUTS):
        texts = {name: value for name, value in config.items() if name not in _INPUTS}
        return texts, ["the language model alone is described, without its encoders"]
    return config, []


def _known(kind: object, outer: object) -> str:
    """Return the entry of the table for ``kind``, the model_type of a language model; ValueError without one.

    Why a file of the type ``outer`` is not supported holds for its language model too.
    """
    if kind is None:
        raise ValueError(f"model_type is missing: add it, one of {', '.join(sorted(TYPES))}")
    if isinstance(kind, str):
        name = SAME.get(kind, kind)
        if name in TYPES:
            return name
        for model_type in (kind, outer):
            if isinstance(model_type, str) and model_type in REFUSED:
                raise ValueError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    hint = _misspelled(kind) if isinstance(kind, str) else ""
    raise ValueError(f"model_type {short(kind)} is not known here: {hint or BY_FLAGS}")


def _misspelled(kind: str) -> str:
    """Return a question for a known type that ``kind`` misspells.

    Types with other numbers, or with another word more, are other types: llama4 is no llama.
    """

    def shape(name: str) -> tuple[list[str], int]:
        return re.findall(r"\d+", name), len(name.split("_"))

    return did_you_mean(kind, [other for other in (*TYPES, *SAME) if shape(other) == shape(kind)], cutoff=0.8)
