"""The record that a training run writes for ``mpp verify``, put together from its ranks' records.

Every rank writes the losses and gradient norms of its steps to a JSON file in one folder, in full precision.
The gradients of a run's first step, where requested, are in the same folder (``runtime.gradients_file``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext import json_input
from megatron_pp_ext.files import write_whole

_STEPS = "steps-of-rank-{}.json"
_FIX = "verify once more"

Losses = Mapping[str, float]
"""The losses of one step by their names."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The losses and the gradient norms (None where Megatron skipped the update) of every step of a run."""

    losses: tuple[Losses, ...]
    norms: tuple[float | None, ...]
    folder: Path | None = None


def write(folder: Path, rank: int, losses: Sequence[Losses], norms: Sequence[float | None]) -> None:
    """Write the steps that ``rank`` has done so far."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"losses": [dict(step) for step in losses], "norms": list(norms)})
    write_whole(folder / _STEPS.format(rank), text + "\n")


def read(folder: Path, steps: int) -> RunRecord:
    """Return the record that the ranks of a run wrote to ``folder``.

    Raises ValueError if they did fewer than ``steps`` steps or contradict each other.
    """
    ranks = [json_input.read(path, _FIX) for path in sorted(folder.glob(_STEPS.format("*")))]
    reported = [rank["losses"] for rank in ranks if any(rank["losses"])]
    if not reported or len(reported[0]) < steps:
        done = len(reported[0]) if reported else 0
        raise ValueError(f"it recorded {done} of {steps} steps in {folder}")
    for quantity, values in (("losses", reported), ("gradient norms", [rank["norms"] for rank in ranks])):
        # As text, since a number that is none does not equal itself.
        if len({json.dumps(value) for value in values}) > 1:
            raise ValueError(f"its ranks report different {quantity}, see {folder}")
    return RunRecord(tuple(reported[0]), tuple(ranks[0]["norms"]), folder)
