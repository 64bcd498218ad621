"""The record that a training run writes for ``mpp verify``, put together from those of its ranks.

Every rank writes the losses and gradient norms of its steps to a JSON file in one folder, in full precision,
and on request the gradients of its first step to a file of tensors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp_ext import json_input
from megatron_pp_ext.files import whole, write_whole

if TYPE_CHECKING:
    import torch

_STEPS, _GRADIENTS = "steps-of-rank-{}.json", "gradients-of-rank-{}.pt"
_FIX = "verify once more"

Losses = Mapping[str, float]
"""The losses of one step by their names."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The losses and the gradient norms (None where Megatron skipped the update) of every step of a run."""

    losses: tuple[Losses, ...]
    norms: tuple[float | None, ...]
    folder: Path | None = None

    @property
    def gradients(self) -> Mapping[str, Path]:
        """The file that holds each parameter's gradient of the first step, by the parameter's global name.

        A tensor that several ranks have is listed once; a name says of which tensor-parallel and
        expert-parallel rank it is a part.
        """
        files: dict[str, Path] = {}
        for path in sorted(self.folder.glob(_GRADIENTS.format("*"))) if self.folder else ():
            for name in _tensors(path):
                files.setdefault(name, path)
        return files


def write(folder: Path, rank: int, losses: Sequence[Losses], norms: Sequence[float | None]) -> None:
    """Write the steps that ``rank`` has done so far."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"losses": [dict(step) for step in losses], "norms": list(norms)})
    write_whole(folder / _STEPS.format(rank), text + "\n")


def write_gradients(folder: Path, rank: int, gradients: Mapping[str, "torch.Tensor"]) -> None:
    """Write the gradients of the first step of ``rank`` by their global names."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with whole(folder / _GRADIENTS.format(rank)) as unfinished:
        torch.save(dict(gradients), unfinished)


def read(folder: Path, steps: int) -> RunRecord:
    """Return what the ranks of a run wrote to ``folder``.

    Raises ValueError if they did fewer than ``steps`` steps or contradict each other.
    """
    ranks = [json_input.read(path, _FIX) for path in sorted(folder.glob(_STEPS.format("*")))]
    reported = [rank["losses"] for rank in ranks if any(rank["losses"])]
    if not reported or len(reported[0]) < steps:
        done = len(reported[0]) if reported else 0
        raise ValueError(f"it recorded {done} of {steps} steps in {folder}")
    for what, values in (("losses", reported), ("gradient norms", [rank["norms"] for rank in ranks])):
        # As text, since a number that is none does not equal itself.
        if len({json.dumps(value) for value in values}) > 1:
            raise ValueError(f"its ranks report different {what}, see {folder}")
    return RunRecord(tuple(reported[0]), tuple(ranks[0]["norms"]), folder)


def common_gradients(
    one: RunRecord, other: RunRecord
) -> Iterator[tuple[str, "torch.Tensor | None", "torch.Tensor | None"]]:
    """Yield every name with the gradients of both runs; None where a run has none of that name."""
    files, others = one.gradients, other.gradients
    for name in dict.fromkeys([*files, *others]):
        yield name, _gradient(files, name), _gradient(others, name)


def _gradient(files: Mapping[str, Path], name: str) -> "torch.Tensor | None":
    return _tensors(files[name])[name] if name in files else None


def _tensors(path: Path) -> dict[str, "torch.Tensor"]:
    import torch

    # Mapped: a tensor is read from the file when it is compared.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
