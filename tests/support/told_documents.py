"""Megatron's own datasets whose samples state where their documents end, as packed ones do."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp_ext import pretrain_gpt

END = 63
"""What the tokenizer of the tiny GPT ends a document with."""


class Told:
    """Samples of ``dataset`` with the ends of their documents, in other places.

    Place k has sample ``order(k)``.
    """

    def __init__(self, dataset: Any, order: Callable[[int], int]) -> None:
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sample = dict(self._dataset[self._order(number)])
        length = len(sample["tokens"])
        starts = [0, *((sample["tokens"][:-1] == END).nonzero().flatten() + 1).tolist()]
        ends = torch.full((length + 1,), length, dtype=torch.int32)
        ends[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        return {**sample, "cu_seqlens": ends}


@contextmanager
def told(order: Callable[[int], int] = int) -> Iterator[None]:
    """Let the datasets of ranks that are started within have samples that state their documents."""
    build = pretrain_gpt.datasets

    @functools.wraps(build)
    def datasets(*args: Any, **kwargs: Any) -> list[Any]:
        return [None if dataset is None else Told(dataset, order) for dataset in build(*args, **kwargs)]

    datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain_gpt.datasets = datasets
    try:
        yield
    finally:
        pretrain_gpt.datasets = build
