"""Compares two runs by loss, gradient norm and gradient, each with its tolerance and reason."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import OtherSums
from megatron_pp_ext.jobs.command import last, whole_number
from megatron_pp_ext.schedule.formats.run_record import RunRecord

if TYPE_CHECKING:
    import torch


_CLIP_BY_DEFAULT = 1.0

_LOW_PRECISION = {
    "--bf16": "bf16",
    "--fp16": "fp16",
    "--fp8": "fp8",
    "--fp8-format": "fp8",
    "--fp4": "fp4",
    "--fp4-format": "fp4",
}

NORM_TOLERANCE = 1e-5
"""The relative distance of two norms: roundings in series of some thousand sums in fp32, five times over.

A rounding moves a number by 2**-23 / sqrt(12) as a standard deviation, 4096 of them in series by 2.2e-6 and
two such sums are 3.1e-6 apart.
"""

_ONE_ROUNDING = 2.0**-9
"""By how much a norm moves at most where all gradients are rounded once more to bf16: half a last bit."""

NOISE = 4.0
"""By how much two runs may differ, as a multiple of the distance of two runs of stock from each other."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative difference that is allowed, and the reason; 0 is bit for bit."""

    allowed: float
    why: str

    def __str__(self) -> str:
        return f"within {self.allowed:.3g}" if self.allowed else "bit for bit"

    def accepts(self, difference: float) -> bool:
        """Whether ``difference`` is allowed; one that is not a number never is."""
        return difference <= self.allowed

    def with_noise(self, spread: float) -> "Tolerance":
        """Return the tolerance where two runs of stock differ by ``spread``."""
        if NOISE * spread <= self.allowed:
            return self
        reason = (
            f"stock differs from stock by {spread:.3g} on this machine, of which {NOISE:g} times is allowed"
        )
        return Tolerance(NOISE * spread, reason)


BITS = Tolerance(0.0, "the same kernels on the same numbers, summed in the same order")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The properties of a job that decide about its last bits.

    ``clip`` is the norm from which gradients are clipped, 0 for never; ``replicas`` is the number of ranks
    over which each gradient is summed.  ``sums`` is a feature's effect on these sums.  ``apart`` is how
    often a microbatch adds to the gradient of the output weight after its first time, where stock sums all
    of that first.

    Both runs use the same kernels on the same numbers and sum each gradient over the microbatches in the same
    order, so most numbers have to agree to the last bit.  Each exception is a sum that is taken in another
    order.
    """

    precision: str = "fp32"
    clip: float = _CLIP_BY_DEFAULT
    experts: bool = False
    apart: int = 0
    replicas: int = 1
    sums: OtherSums | None = None

    @classmethod
    def of_flags(cls, words: Sequence[str], ranks: int) -> "Arithmetic":
        """Return the arithmetic of a job of ``ranks`` ranks; ValueError for a flag without its number."""
        parallel = whole_number(words, "--tensor-model-parallel-size")
        parallel *= whole_number(words, "--pipeline-model-parallel-size")
        return cls(
            next((name for flag, name in _LOW_PRECISION.items() if flag in words), "fp32"),
            _clip(words),
            "--num-experts" in words,
            _allowed_distance(words),
            max(1, ranks // parallel),
            next((sums for feature in FEATURES for sums in feature.sums if sums.flag in words), None),
        )

    def losses(self, stock: RunRecord, step: int) -> Tolerance:
        """The tolerance for the losses of ``step``, counted from 0."""
        reasons = list(self._reasons(stock, step))
        if not reasons:
            return BITS
        if self.precision == "fp32":
            allowed = 1e-6 if step == 0 or reasons == [_CLIPPED] else 1e-4
        else:
            allowed = 1e-2 if self.experts else 1e-3
            reasons.append(f"and in {self.precision} that last bit decides how a weight rounds")
            if self.experts:
                reasons.append("and may send a token to another expert")
        return Tolerance(allowed, ", ".join(reasons))

    def norms(self, stock: RunRecord, step: int) -> Tolerance:
        """The tolerance for the gradient norm of ``step``, counted from 0."""
        # An update moves a norm by about four times as much as a loss, and in a lower precision each adds
        # to what those before it have moved.
        later = self.losses(stock, step)
        allowed = 4 * later.allowed * (1 if self.precision == "fp32" else step)
        if allowed > NORM_TOLERANCE:
            return Tolerance(allowed, later.why)
        if self.precision != "fp32" and (reason := self._rounds_gradients()):
            return Tolerance(1e-3 if self.precision == "fp16" else _ONE_ROUNDING, reason)
        return Tolerance(NORM_TOLERANCE, "a norm is summed rank by rank, and the ranks hold other layers")

    def gradient(self, name: str) -> Tolerance:
        """The tolerance for the first step's gradient of the parameter ``name``."""
        if self.apart and name.startswith(("output_layer.", "embedding.word_embeddings.")):
            # Stock's sum of a microbatch is in the lower precision, and gradients may be kept in it.
            return Tolerance(self.apart * (1e-5 if self.precision == "fp32" else 2e-2), _APART)
        if self.sums is not None:
            return Tolerance(self.sums.fp32 if self.precision == "fp32" else self.sums.lower, self.sums.why)
        if self.replicas > 2:
            return Tolerance(1e-5 if self.precision == "fp32" else 2e-2, _REPLICAS)
        return BITS

    def _rounds_gradients(self) -> str:
        """Return why a sum in another order rounds gradients of the first step otherwise; "" if none does."""
        if self.apart:
            return _APART
        if self.sums is not None:
            return self.sums.why
        return _REPLICAS if self.replicas > 2 else ""

    def _reasons(self, stock: RunRecord, step: int) -> list[str]:
        reasons = [] if self.sums is None else [self.sums.why]
        if step == 0:
            return reasons
        if any(norm is not None and 0 < self.clip < norm for norm in stock.norms[:step]):
            reasons.append(_CLIPPED)
        if self.apart:
            reasons.append(_APART)
        if self.replicas > 2:
            reasons.append(_REPLICAS)
        return reasons


_CLIPPED = "updates were clipped by a norm, which is summed rank by rank"
_APART = "a microbatch adds to the vocabulary's weight in several places, of which stock takes the sum first"
_REPLICAS = "more than two replicas are summed in an order that goes by a gradient's place in its buffer"


def _allowed_distance(words: Sequence[str]) -> int:
    """See ``Arithmetic``: the logits of every MTP depth use the output weight again.

    A tied one is looked up too, for which no W waits.  In pairs each part of a plan adds its own gradient.
    """
    if "--untie-embeddings-and-output-weights" in words and "--overlap-moe-expert-parallel-comm" not in words:
        return 0
    by_pattern = (last(words, "--hybrid-layer-pattern") or "").count("/")
    return max(whole_number(words, "--mtp-num-layers", 0), by_pattern)


def _clip(words: Sequence[str]) -> float:
    value = last(words, "--clip-grad")
    try:
        return _CLIP_BY_DEFAULT if value is None else float(value)
    except ValueError:
        raise ValueError("--clip-grad needs a number after it: correct the job's flags") from None


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
class EqualityVerdict:
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
) -> EqualityVerdict:
    """Return the differences of ``run`` from ``stock``.

    ``again`` is a second run of stock, whose distance from the first widens the tolerances.  With
    ``gradients``, the gradients of the first step are compared too, if the runs recorded them.
    """
    rows = list(_rows(stock, run, arithmetic, gradients))
    if again is not None:
        spread = {(row.name, row.step): row.difference for row in _rows(stock, again, arithmetic, gradients)}
        rows = [_with_noise(row, spread.get((row.name, row.step), 0.0)) for row in rows]
    return EqualityVerdict(tuple(rows))


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
