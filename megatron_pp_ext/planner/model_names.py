"""Models by name, by Hugging Face ``config.json``, or as JSON in Megatron's names.

The named ones are the files of ``planner/models``: a Hugging Face configuration each, with the source of its
figures, the number of parameters as published, and the sequence length to plan with.
"""

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from megatron_pp_ext.json_input import did_you_mean, naming, parse, require_printable
from megatron_pp_ext.json_input import read as read_json
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from megatron_pp_ext.planner.step import model_description

_MODELS = resources.files("megatron_pp_ext.planner") / "models"


@dataclass(frozen=True, slots=True)
class Named:
    """A named model: ``parameters`` as published, with their ``source``, and its arguments for Megatron."""

    name: str
    title: str
    source: str
    parameters: float
    described: GivenModel


def names() -> list[str]:
    """Return the names of all models that are shipped."""
    return sorted(item.name.removesuffix(".json") for item in _MODELS.iterdir())


def named(name: str) -> Named:
    """Return the shipped model ``name``."""
    content = parse((_MODELS / f"{name}.json").read_text(encoding="utf-8"), "install the package again")
    described = config_json.read(content["config"])
    values = {**described.values, "seq_length": content["seq_length"]}
    about = (content["title"], content["source"], content["parameters"])
    return Named(
        name, *about, replace(described, name=name, values=values, assumed=described.assumed - {"seq_length"})
    )


def read(name: str) -> GivenModel:
    """Return the model that ``--model given`` names.

    It is a shipped name, a Hugging Face config.json or its folder, or a JSON object of Megatron's names.
    ValueError, naming the file or the name, for anything else and for models that are not supported.
    """
    path = Path(name)
    path = _file_of_folder(path) if path.is_dir() else path
    spelled = name.strip().lower().replace("_", "-")
    if spelled in names() and not path.is_file():
        return named(spelled).described
    if not path.is_file():
        if path.suffix == ".json":
            raise ValueError(f"{path}: No such file or directory; correct --model")
        hint = did_you_mean(spelled, names(), "no shipped model resembles it")
        raise ValueError(f"--model {name} is neither a file nor a name: {hint} (mpp models lists them)")
    with naming(path):
        content = read_json(path, "write an object of Megatron's names")
        if not isinstance(content, dict):
            raise ValueError("is no object: write one of Megatron's names, such as num_layers")
        config_json.refuse_other_files(content)
        if config_json.is_config(content):
            return replace(config_json.read(content), name=name)
        for name, value in content.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    with naming(name):
                        require_printable(text)
    model_description.require_known(content, str(path))
    return GivenModel(name, content)


def _file_of_folder(folder: Path) -> Path:
    """Return the file that describes the model of ``folder``, or that of its adapter where it is alone."""
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    return adapter if adapter.is_file() and not file.is_file() else file
