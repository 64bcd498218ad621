"""Measured costs as a file: JSON with one object for each stage, in model order.

    {"hop": 0.0006, "message": 1.7e7,
     "stages": [{"forward": 0.0185, "input_gradient": 0.0181, "weight_gradient": 0.0093,
                 "activation": 5.1e8, "released_by_input_gradient": 1.2e8}, ...]}

The names are those of ``StageCosts`` and ``Costs``.  Times are in seconds, activations and a
message in bytes or any other common unit.  ``hop``, ``message``, ``pair``, ``activation`` and
``released_by_input_gradient`` may be left out.  Where the ranks share the vocabulary, ``vocabulary`` is an
object with the names of ``VocabularyCosts``.  Anything else is refused, since a misspelt name would otherwise
leave a default in force.
"""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megatron_pp_ext import json_input
from megatron_pp_ext.files import write_whole
from megatron_pp_ext.json_input import is_number, naming, require_names, short
from megatron_pp_ext.schedule.costs import Costs, StageCosts, VocabularyCosts

_SHARED = ("hop", "message", "pair")
"""The names of the costs that are one number for the whole pipeline; they may be left out."""


def write(costs: Costs, path: str | Path) -> None:
    """Write ``costs`` to ``path``."""
    content = {name: value for name, value in asdict(costs).items() if value is not None}
    write_whole(Path(path), json.dumps(content, indent=1) + "\n")


def read(path: str | Path, stages: int | None = None) -> Costs:
    """Read the costs in ``path``, which must be for ``stages`` stages if that is given.

    Raises ValueError, naming the file and the stage, for anything that is not as described above.
    """
    path = Path(path)
    with naming(path):
        content = json_input.read(path, "write {'hop': ..., 'stages': [...]}")
        require_names(content, (*_SHARED, "vocabulary", "stages"), ("stages",))
        rows = content["stages"]
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"'stages' is {short(rows)}, but must be a list with an object a stage")
        if stages is not None and len(rows) != stages:
            raise ValueError(
                f"has costs for {len(rows)} stages, but there are {stages} (ranks x chunks): "
                f"give {stages} objects in 'stages'"
            )
        found = []
        for number, row in enumerate(rows):
            with naming(f"stage {number}"):
                found.append(StageCosts(**_numbers_of(StageCosts, row)))
        shared = None
        if "vocabulary" in content:
            with naming("vocabulary"):
                shared = VocabularyCosts(**_numbers_of(VocabularyCosts, content["vocabulary"]))
        numbers = _numbers({name: content[name] for name in _SHARED if name in content})
        return Costs(tuple(found), vocabulary=shared, **numbers)


def _numbers_of(costs: type[StageCosts | VocabularyCosts], row: dict[str, Any]) -> dict[str, float]:
    known = fields(costs)
    required = [field.name for field in known if field.default is MISSING]
    require_names(row, [field.name for field in known], required)
    return _numbers(row)


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    for name, value in row.items():
        if not is_number(value):
            raise ValueError(f"{name} is {short(value)}, but must be a finite number: correct it")
    return {name: float(value) for name, value in row.items()}
