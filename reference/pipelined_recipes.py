"""Recipes that NVIDIA publishes with more than one pipeline rank, from ``pipelined_recipes.json``.

The file has their settings as Megatron's flags, with the sources.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class PipelinedRecipe:
    """A published configuration on ``gpus`` GPUs of the kind ``gpu``.

    ``model`` is a name of ``mpp models``, or None where the ``flags`` have its sizes.  ``recipe`` is its name
    in the source, where it has one.
    """

    name: str
    task: str
    gpu: str
    gpus: int
    precision: str
    source: str
    recipe: str | None
    model: str | None
    flags: tuple[str, ...]

    def has(self, flag: str) -> bool:
        """Whether ``flag`` is among the flags."""
        return flag in self.flags

    def value(self, flag: str, default: str = "") -> str:
        """Return the words after ``flag``, joined by spaces; ``default`` without the flag."""
        return " ".join(self._after(flag)) if self.has(flag) else default

    def _after(self, flag: str) -> Iterator[str]:
        for word in self.flags[self.flags.index(flag) + 1 :]:
            if word.startswith("--"):
                return
            yield word


@cache
def recipes() -> tuple[PipelinedRecipe, ...]:
    """Return all recipes, in the order of the file."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    of_all = content["flags_of_all"].split()
    return tuple(
        PipelinedRecipe(**{**row, "flags": (*of_all, *row["flags"].split())}) for row in content["recipes"]
    )
