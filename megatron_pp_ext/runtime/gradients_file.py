"""The gradients of the first step of a run: a file of tensors for each rank, all in one folder."""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_pp_ext.files import whole

_NAME = "gradients-of-rank-{}.pt"


def write(folder: Path, rank: int, gradients: Mapping[str, torch.Tensor]) -> None:
    """Write the gradients of ``rank`` by their global names."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole(folder / _NAME.format(rank)) as unfinished:
        torch.save(dict(gradients), unfinished)


def files_by_name(folder: Path) -> dict[str, Path]:
    """Return the file that holds each parameter's gradient, by the parameter's global name.

    A tensor that several ranks have is listed once; a name states of which tensor-parallel and
    expert-parallel rank it is a part.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob(_NAME.format("*"))):
        for name in read(path):
            files.setdefault(name, path)
    return files


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the gradients in ``path`` by name, each of which is read from the file when it is used."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
