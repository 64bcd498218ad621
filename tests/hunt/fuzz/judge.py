"""How far a run may be from stock's: what the documents promise, with the tolerances of ``mpp verify``.

Those are fixed numbers, and what rounding becomes in steps after an update is not: where stock moves more by
``noise`` of a last bit, four times that is allowed in such steps, if the documents allow anything there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megatron_pp_ext.schedule.formats.run_record import RunRecord
from megatron_pp_ext.verification.verdict import LOSS, Arithmetic, compare, relative
from tests.hunt.fuzz.noise import SILENCE, Noise
from tests.support import rounding
from tests.support.comparison import Result

_OTHER_ORDER = 3
"""Replicas from which on sums are taken in another order than stock's, as under some csv files."""

_CANCELLED = 0.01
"""A share of the largest gradient of all: a smaller one may be what rounding leaves of terms that cancel.

Attention does not change with a bias of the keys, for one, so that its exact gradient is 0.
"""


def arithmetic(flags: Sequence[str], ranks: int, other_order: bool) -> Arithmetic:
    """What decides about the last bits of a job; in ``other_order`` each stage sums its gradients."""
    known = Arithmetic.of_flags(flags, ranks)
    return replace(known, replicas=max(known.replicas, _OTHER_ORDER)) if other_order else known


def differences(ours: Result, theirs: Result, allowed: Arithmetic, noise: Noise = SILENCE) -> Iterator[str]:
    """Yield a line for every number of ``ours`` that is further from stock's than is allowed."""
    yield from _gradients(ours, theirs, allowed)
    yield from later_differences(ours, theirs, allowed, 0, noise)
    if len(ours.validation) != len(theirs.validation):
        yield f"{len(ours.validation)} evaluations, but {len(theirs.validation)} under stock"
    last = allowed.losses(_record(theirs), len(theirs.losses))
    evaluated = last.with_noise(noise.losses) if last.allowed else last
    logged = last.with_noise(noise.logged) if last.allowed else last
    for number, (mine, stock) in enumerate(zip(ours.validation, theirs.validation, strict=False), 1):
        if not evaluated.accepts(apart := relative(mine, stock)):
            within = f"{apart:.2g} apart, allowed {evaluated}"
            yield f"evaluation {number}: {mine} and under stock {stock}, {within}"
    for step, (mine, stock) in enumerate(zip(ours.logged, theirs.logged, strict=False), 1):
        if mine.keys() != stock.keys():
            yield f"step {step}: logs {', '.join(mine)}, but under stock {', '.join(stock)}"
        for name in mine.keys() & stock.keys():
            within = logged.allowed + rounding.PRINTED
            if not (apart := relative(float(mine[name]), float(stock[name]))) <= within:
                yield f"step {step}: {name} logged {mine[name]}, under stock {stock[name]}, {apart:.2g} apart"


def later_differences(
    ours: Result, theirs: Result, allowed: Arithmetic, first: int, noise: Noise = SILENCE
) -> Iterator[str]:
    """Yield a line for each such loss and norm of ``ours``, which begins with step ``first`` from 0."""
    if len(ours.losses) + first != len(theirs.losses):
        yield f"{len(ours.losses)} losses, but {len(theirs.losses) - first} under stock"
    stock, mine = _record(theirs), _record(ours)
    whole = RunRecord(stock.losses[:first] + mine.losses, stock.norms[:first] + mine.norms)
    for row in compare(stock, whole, allowed).rows:
        tolerance = row.tolerance
        if row.step > 1 and allowed.losses(stock, row.step - 1).allowed:
            tolerance = tolerance.with_noise(noise.losses if row.kind == LOSS else noise.norms)
        if not tolerance.accepts(row.difference):
            yield (
                f"step {row.step}: {row.name} {row.ours} and under stock {row.stock}, {row.difference:.2g} "
                f"apart, allowed {tolerance}"
            )


def _record(result: Result) -> RunRecord:
    return RunRecord(tuple({"lm loss": loss} for loss in result.losses), tuple(result.norms))


def _gradients(ours: Result, theirs: Result, allowed: Arithmetic) -> Iterator[str]:
    if missing := ours.gradients.keys() ^ theirs.gradients.keys():
        yield f"gradients that one of the runs lacks: {sorted(missing)}"
    found = []
    largest = max(map(_largest, theirs.gradients.values()), default=0.0)
    for (name, part), stock in theirs.gradients.items():
        mine = ours.gradients.get((name, part))
        tolerance = allowed.gradient(name)
        # Where a step is skipped, sums in another order may overflow at other places.
        all_count = bool(theirs.norms and theirs.norms[0] is not None) or not tolerance.allowed
        if mine is not None and not tolerance.accepts(
            apart := _apart(mine, stock, _CANCELLED * largest, all_count)
        ):
            found.append((apart, f"{name} of tensor rank {part}, allowed {tolerance}"))
    if found:
        apart, worst = max(found)
        yield f"{len(found)} of {len(theirs.gradients)} gradients, most {apart:.2g}: {worst}"


def _apart(mine: torch.Tensor, stock: torch.Tensor, least: float, all_count: bool) -> float:
    """The largest distance of two numbers, relative to the largest, which counts as no less than ``least``.

    What is not finite has to be the same in both, unless only finite numbers count.
    """
    if mine.shape != stock.shape:
        return float("inf")
    # Where fp16 overflows, the numbers are infinite or none in both.
    same = (mine == stock) | (mine.isnan() & stock.isnan())
    if not all_count:
        same |= ~(mine.isfinite() & stock.isfinite())
    if same.all():
        return 0.0
    scale = max(_largest(stock), least)
    distance = (mine.double() - stock.double())[~same].abs().max().item()
    return distance / scale if scale and math.isfinite(distance) else float("inf")


def _largest(numbers: torch.Tensor) -> float:
    """The largest of the finite numbers, 0 if there are none."""
    finite = numbers[numbers.isfinite()].double().abs()
    return finite.max().item() if finite.numel() else 0.0
