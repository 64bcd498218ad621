"""Compare the records of two runs: every loss, gradient norm and gradient, each with its tolerance."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp_ext.schedule.formats.run_record import RunRecord
from megatron_pp_ext.verification.tolerances import Arithmetic, Tolerance

if TYPE_CHECKING:
    import torch

LOSS, NORM, GRADIENT = "loss", "gradient norm", "gradient"


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both runs.

    ``step`` counts from 1.  ``stock`` and ``ours`` are None where a step was skipped, and for a gradient,
    which is a whole tensor.  ``difference`` is relative: to the larger number, or to the largest of a
    tensor; it is infinite where only one run has the number, or where it is not finite.
    """

    kind: str
    name: str
    step: int
    stock: float | None
    ours: float | None
    difference: float
    tolerance: Tolerance

    @property
    def is_equal(self) -> bool:
        """Whether the difference is allowed."""
        return self.tolerance.accepts(self.difference)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All rows of a comparison."""

    rows: tuple[Row, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every difference is allowed."""
        return all(row.is_equal for row in self.rows)

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    def largest(self, kind: str) -> Row:
        """Return the row of ``kind`` that is furthest apart; the first one of several."""
        return max(self.of(kind), key=lambda row: row.difference)


def compare(
    stock: RunRecord,
    run: RunRecord,
    arithmetic: Arithmetic,
    again: RunRecord | None = None,
    gradients: bool = False,
) -> Verdict:
    """Return the differences of ``run`` from ``stock``.

    ``again`` is a second run of stock, whose distance from the first widens the tolerances.  With
    ``gradients``, the gradients of the first step are compared too, if the runs recorded them.
    """
    rows = list(_rows(stock, run, arithmetic, gradients))
    if again is not None:
        spread = {(row.name, row.step): row.difference for row in _rows(stock, again, arithmetic, gradients)}
        rows = [_with_noise(row, spread.get((row.name, row.step), 0.0)) for row in rows]
    return Verdict(tuple(rows))


def relative(first: float | None, second: float | None) -> float:
    """Return the distance of two numbers relative to the larger; two skipped steps are equal."""
    if first is None or second is None:
        return 0.0 if first is second else math.inf
    return _part(abs(first - second), max(abs(first), abs(second)))


def _with_noise(row: Row, spread: float) -> Row:
    return replace(row, tolerance=row.tolerance.with_noise(spread)) if math.isfinite(spread) else row


def _rows(stock: RunRecord, run: RunRecord, arithmetic: Arithmetic, gradients: bool) -> Iterator[Row]:
    for step, (stock_losses, run_losses) in enumerate(zip(stock.losses, run.losses, strict=False)):
        for name in dict.fromkeys([*stock_losses, *run_losses]):
            stock_value, run_value = stock_losses.get(name), run_losses.get(name)
            tolerance = arithmetic.losses(stock, step)
            yield Row(
                LOSS, name, step + 1, stock_value, run_value, relative(stock_value, run_value), tolerance
            )
    for step, (stock_value, run_value) in enumerate(zip(stock.norms, run.norms, strict=False)):
        yield Row(
            NORM,
            NORM,
            step + 1,
            stock_value,
            run_value,
            relative(stock_value, run_value),
            arithmetic.norms(stock, step),
        )
    if gradients:
        for name, whole, part in _common_gradients(stock.folder, run.folder):
            yield Row(GRADIENT, name, 1, None, None, _apart(whole, part), arithmetic.gradient(name))


def _common_gradients(
    first: Path | None, second: Path | None
) -> Iterator[tuple[str, "torch.Tensor | None", "torch.Tensor | None"]]:
    """Yield every name with the gradients of both runs, by their folders; None where a run has none of it."""
    from megatron_pp_ext.runtime import gradients_file  # torch takes a second to import

    first_files, second_files = (
        gradients_file.files_by_name(folder) if folder else {} for folder in (first, second)
    )

    def read(file: Path | None, name: str) -> "torch.Tensor | None":
        return gradients_file.read(file)[name] if file else None

    for name in dict.fromkeys([*first_files, *second_files]):
        yield name, read(first_files.get(name), name), read(second_files.get(name), name)


def _apart(first: "torch.Tensor | None", second: "torch.Tensor | None") -> float:
    """Return the largest distance of two numbers of two gradients, relative to the largest number."""
    if first is None or second is None or first.shape != second.shape:
        return math.inf
    if first.numel() == 0:
        return 0.0
    largest = max(first.abs().max().item(), second.abs().max().item())
    return _part((first.double() - second.double()).abs().max().item(), largest)


def _part(distance: float, largest: float) -> float:
    """Return ``distance`` as a part of ``largest``; infinite where one of them is not finite."""
    if not (math.isfinite(largest) and math.isfinite(distance)):
        return math.inf
    return distance / largest if distance else 0.0
