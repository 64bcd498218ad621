"""What the layers of measured stages take, and what the ends of the model take beside theirs."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median

from megatron_pp_ext.planner.layout.layer_row import Seconds, seconds_of
from megatron_pp_ext.schedule.costs import Costs


def divided(
    costs: Costs, sizes: Sequence[float], known: Sequence[int]
) -> tuple[tuple[Seconds, ...], Seconds, Seconds]:
    """Return the seconds of every layer, and those of the first and of the last stage beside their layers.

    Stage s has ``known[s]`` layers, which share its seconds in ``costs`` in proportion to their ``sizes``.
    In the first and the last stage they take at most what layers of their size take between these, by the
    median, or in the first stage where nothing is between.  What is left is the embedding's or the loss's.
    """
    totals = [sum(sizes[start:end]) for start, end in pairwise(accumulate(known, initial=0))]
    rates, front, back = zip(*(_rates(took, totals) for took in _by_kind(costs)), strict=True)
    by_stage = list(zip(*rates, strict=True))
    stages = [stage for stage, count in enumerate(known) for _ in range(count)]
    seconds = [
        tuple(rate * size for rate in by_stage[stage]) for stage, size in zip(stages, sizes, strict=True)
    ]
    return tuple(seconds), front, back


def _by_kind(costs: Costs) -> list[tuple[float, ...]]:
    """Return the seconds of all stages: of their F, of their I, and of their W."""
    return list(zip(*map(seconds_of, costs.stages), strict=True))


def _rates(took: Sequence[float], totals: Sequence[float]) -> tuple[list[float], float, float]:
    """Return each stage's seconds for a layer of size 1, and those of the ends beside their layers."""
    rates = [own / total if total else 0.0 for own, total in zip(took, totals, strict=True)]
    usual = median([rate for rate in rates[1:-1] if rate] or [rates[0] or inf])
    front, back = (_beside(took[end], totals[end], usual) for end in (0, -1))
    rates[0], rates[-1] = min(rates[0], usual), min(rates[-1], usual)
    return rates, front, back


def _beside(took: float, total: float, usual: float) -> float:
    """Return what an end takes beside layers of the size ``total``."""
    if not total:
        return took
    return took - usual * total if took / total > usual else 0.0
