"""Shapes of messages that follow from the batches, and need not be announced.

A loop may pad what it reads, or put something between.  So a step whose messages announce their shapes tells
first whether all of them follow from the tensors that were read; then those of later steps are taken to do so
too, on all ranks of the pipeline.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp_ext.features.lengths.megatron.agreement import Agreed, Sizes
from megatron_pp_ext.integration.runners.message_groups import shapes_of
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.channels import OtherShape, Shape

_ROWS = "tokens", "input_ids", "labels", "position_ids"
"""The names of tensors with a row for each sequence, and a column for each token."""


class KnownShapes:
    """Hands over the shapes of messages ahead, once a step has shown that they follow from batches."""

    def __init__(self) -> None:
        self._follow: bool | None = None

    @property
    def are_trusted(self) -> bool:
        """Whether this rank has seen that shapes follow from batches."""
        return bool(self._follow)

    @staticmethod
    def known_sizes(inputs: StepInputs, data: Sequence[Sequence[Any] | None]) -> Sizes:
        """Return the sizes of a step's microbatches, as ``sizes_of``; empty where they tell no shapes."""
        sizes = sizes_of(data)
        return sizes if shapes_of(inputs, sizes) else ()

    @staticmethod
    def are_announced(inputs: StepInputs, agreed: Agreed) -> bool:
        """Return whether messages of a step announce their shapes."""
        return not inputs.shape and not agreed.are_trusted

    @contextmanager
    def step(self, inputs: StepInputs, agreed: Agreed, order: Sequence[int]) -> Iterator[None]:
        """Surround a step whose microbatches run in this ``order``.

        RuntimeError where a stage makes a message of another shape than was handed over.
        """
        followed = () if inputs.shape else shapes_of(inputs, agreed.sizes)
        shapes = [followed[number] for number in order] if followed else []
        if not self.are_announced(inputs, agreed):
            inputs.shapes = shapes
        try:
            yield
        except OtherShape as error:
            if not inputs.shapes:
                raise
            raise RuntimeError(
                f"{error}, or keep the order of the data (order='given'), whose messages announce their "
                "shapes: in the first steps all shapes followed from the batches"
            ) from error
        if shapes and self._follow is None and inputs.announced is not None:
            self._learn(inputs.announced, shapes)

    def _learn(self, announced: Mapping[int, set[Shape]], shapes: Sequence[Shape]) -> None:
        """Compare what a step has announced; equal shapes tell nothing of how others would be padded."""
        if announced != {number: {shape} for number, shape in enumerate(shapes)}:
            self._follow = False
        elif len(set(shapes)) > 1:
            self._follow = True


def sizes_of(data: Sequence[Sequence[Any] | None]) -> Sizes:
    """Return the sizes of the microbatches of a step, from the ``data`` of each chunk that reads some."""
    own = next((batches for batches in data if batches is not None), ())
    sizes = [size_of(batch) for batch in own]
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


def size_of(batch: Any) -> tuple[int, int] | None:
    """Return how many sequences a batch has, and of how many tokens each; None where it has no such rows."""
    for name in _ROWS if isinstance(batch, Mapping) else ():
        found = batch.get(name)
        if isinstance(found, torch.Tensor) and found.dim() == 2 and not found.is_nested:
            rows, tokens = found.shape
            return rows, tokens
    return None
