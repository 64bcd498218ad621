"""Models by name, by Hugging Face ``config.json``, or as JSON in Megatron's names.

The named ones are the files of ``planner/models``: a Hugging Face configuration each, with the source of its
figures, the number of parameters as published, and the sequence length to plan with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_pp_ext.json_input import did_you_mean, naming, parse
from megatron_pp_ext.json_input import read as read_json
from megatron_pp_ext.planner import hugging_face
from megatron_pp_ext.planner.step import model_description

_MODELS = resources.files("megatron_pp_ext.planner") / "models"


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A model's ``values`` by the names of Megatron's arguments, and the sliding window of its attention.

    ``window`` is in tokens, None where attention sees all of them.
    """

    name: str
    values: Mapping[str, Any]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A named model: ``parameters`` as published, with their ``source``, or the ``refusal``."""

    name: str
    title: str
    source: str
    parameters: float
    values: Mapping[str, Any]
    refusal: str = ""


def names() -> list[str]:
    """Return the names of all models that are shipped."""
    return sorted(item.name.removesuffix(".json") for item in _MODELS.iterdir())


def named(name: str) -> Named:
    """Return the shipped model ``name``."""
    content = parse((_MODELS / f"{name}.json").read_text(encoding="utf-8"), "install the package again")
    about = (name, content["title"], content["source"], content["parameters"])
    try:
        values = {**hugging_face.arguments(content["config"]), "seq_length": content["seq_length"]}
    except ValueError as error:
        return Named(*about, {}, str(error))
    return Named(*about, values)


def read(given: str) -> GivenModel:
    """Return the model that ``--model given`` names.

    It is a shipped name, a Hugging Face config.json or its folder, or a JSON object of Megatron's names.
    ValueError, naming the file or the name, for anything else and for models that are not supported.
    """
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    spelled = given.strip().lower().replace("_", "-")
    if spelled in names() and not path.is_file():
        model = named(spelled)
        if model.refusal:
            raise ValueError(f"--model {given}: {model.refusal}")
        return GivenModel(spelled, model.values)
    if not path.is_file():
        if path.suffix == ".json":
            raise ValueError(f"{path}: No such file or directory; correct --model")
        hint = did_you_mean(spelled, names(), "no shipped model resembles it")
        raise ValueError(f"--model {given} is neither a file nor a name: {hint} (mpp models lists them)")
    with naming(path):
        content = read_json(path, "write an object of Megatron's names")
        if not isinstance(content, dict):
            raise ValueError("is no object: write one of Megatron's names, such as num_layers")
        if hugging_face.is_config(content):
            return GivenModel(given, hugging_face.arguments(content), hugging_face.sliding_window(content))
    model_description.require_known(content, str(path))
    return GivenModel(given, content)
