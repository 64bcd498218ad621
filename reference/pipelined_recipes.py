"""What Megatron-Bridge's recipes with more than one pipeline rank set, from files of ``pipelined_recipes``.

``python -m scripts.bridge_recipes`` writes the file of a version from the recipes themselves.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_suffix("")


@dataclass(frozen=True, slots=True, eq=False)
class PipelinedRecipe:
    """The recipe ``recipe``, MODULE:FUNCTION below megatron.bridge, for ``gpus`` GPUs of the kind ``device``.

    ``arguments`` are Megatron's, without those that have their defaults.  ``without_config`` is the model
    whose config.json was not there, so that they have no sizes; None where they have.  ``notes`` are
    sentences on what they leave out.
    """

    recipe: str
    gpus: int
    device: str
    without_config: str | None
    notes: tuple[str, ...]
    arguments: Mapping[str, Any]

    @property
    def is_for_performance(self) -> bool:
        """Whether it is one of Bridge's performance recipes, and none of its library."""
        return self.recipe.startswith("perf_")

    @property
    def family(self) -> str:
        """The models that Bridge has in a folder together."""
        return self.recipe.split(".")[1]

    @property
    def name(self) -> str:
        """The name of the function without its common end."""
        return self.recipe.rpartition(":")[2].removesuffix("_config")

    @property
    def trains_adapters(self) -> bool:
        """Whether it trains adapters alone."""
        return any("adapters" in note for note in self.notes)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The recipes with a pipeline of one version of Megatron-Bridge.

    Of all recipes ``evaluated`` could be evaluated; ``not_evaluated`` are the others, with reasons.
    """

    version: str
    evaluated: int
    not_evaluated: Mapping[str, str]
    recipes: tuple[PipelinedRecipe, ...]


@cache
def versions() -> tuple[Version, ...]:
    """Return all versions that are stored, the newest release first, then commits."""
    return tuple(_read(file) for file in sorted(_FOLDER.glob("*.json")))


def _read(file: Path) -> Version:
    content = json.loads(file.read_text(encoding="utf-8"))
    common = content["of_all"]
    rows = tuple(
        PipelinedRecipe(**{**row, "notes": tuple(row["notes"]), "arguments": common | row["arguments"]})
        for row in content["recipes"]
    )
    return Version(content["version"], content["evaluated"], content["not_evaluated"], rows)
