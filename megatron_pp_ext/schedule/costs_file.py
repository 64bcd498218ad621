"""Measured costs as a file: JSON with an object a stage, in model order.

    {"hop": 0.0006, "message": 1.7e7,
     "stages": [{"forward": 0.0185, "input_gradient": 0.0181, "weight_gradient": 0.0093,
                 "activation": 5.1e8, "released_by_input_gradient": 1.2e8}, ...]}

The names are those of ``StageCosts`` and ``Costs``.  Times are in seconds, activations and a
message in bytes or any other unit, as long as it is one.  ``hop``, ``message``, ``activation`` and
``released_by_input_gradient`` may be left out.  Anything else is refused: a misspelt name would quietly be
a default.
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_pp_ext.schedule.costs import Costs, StageCosts

_FIELDS = {field.name: field.default is MISSING for field in fields(StageCosts)}
"""The names of a stage's costs, and whether each must be given."""

_OF_ALL = ("hop", "message")
"""The names of what is one number for the whole pipeline, and may be left out."""


def write(costs: Costs, path: str | Path) -> None:
    """Write ``costs`` to ``path``."""
    Path(path).write_text(json.dumps(asdict(costs), indent=1) + "\n", encoding="utf-8")


def read(path: str | Path, stages: int | None = None) -> Costs:
    """The costs in ``path``, which must be for ``stages`` stages if that is given.

    Raises ValueError, naming the file and the stage, for anything that is not as described above.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}): write {{'hop': ..., 'stages': [...]}}") from None
    _require_names(f"{path}", content, dict.fromkeys(_OF_ALL, False) | {"stages": True})
    rows = content["stages"]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: 'stages' is {_short(rows)}, but must be a list with an object a stage")
    if stages is not None and len(rows) != stages:
        raise ValueError(
            f"{path}: has costs for {len(rows)} stages, but there are {stages} (ranks x chunks): "
            f"give {stages} objects in 'stages'"
        )
    found = []
    for number, row in enumerate(rows):
        where = f"{path}: stage {number}"
        _require_names(where, row, _FIELDS)
        values = {name: _number(where, name, value) for name, value in row.items()}
        try:
            found.append(StageCosts(**values))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    try:
        return Costs(
            tuple(found),
            **{name: _number(str(path), name, content[name]) for name in _OF_ALL if name in content},
        )
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _require_names(where: str, content: Any, names: dict[str, bool]) -> None:
    """``content`` is an object with the ``names``, of which those marked True must be there."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: is {_short(content)}, but must be an object with {_listed(names)}")
    for name in content:
        if name not in names:
            nearest = get_close_matches(name, names, n=1, cutoff=0.5)
            guess = f"did you mean {nearest[0]!r}?" if nearest else f"known are {_listed(names)}"
            raise ValueError(f"{where}: {name!r} is unknown: {guess}")
    for name, is_needed in names.items():
        if is_needed and name not in content:
            raise ValueError(f"{where}: {name!r} is missing: add it")


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {name} is {_short(value)}, but must be a number: correct it")
    return float(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
