"""The layout with which stages that were measured would make a shorter pipeline."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.model_row import ModelRow
from megatron_pp_ext.planner.layout.rows import LayerRow, Seconds, Shortest, seconds_of, shortest
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

_WORTH = 0.01
"""The part of the makespan that another layout has to save to be advised."""


def advised(
    job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float = 0.0
) -> tuple[str, Shortest] | None:
    """Return a layout that is shorter than that of ``job`` by a hundredth at least, or None.

    ``costs`` are the costs of the stages of ``schedule``, which is called ``name``, and ``data`` is the
    data-parallel size.  ``free`` are the bytes that the fullest device leaves for activations and messages.
    By estimate no rank needs more than that, or than the fullest one needs now.  Nothing is advised for a
    model that is cut by its pattern, or with multi-token prediction in another stage than the loss.
    ValueError for layers that cannot be estimated.
    """
    stages = schedule.placement.stages
    if job.model.pattern or layers.predicting_stage(job, stages) not in (None, stages - 1):
        return None
    present = tuple(layers.by_stage(job, stages))
    model = model_parts(job)
    described = ModelRow(job, model, data, schedule, name)
    sizes = [part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
             for part in model.layers]  # fmt: skip
    seconds, front, back = divided(costs, sizes, present)
    least = [*described.least]
    for end, extra in ((0, front), (-1, back)):
        least[end] = max(least[end], int(not all(extra[:3])))
    fewest = tuple(map(min, least, present))
    row = LayerRow(
        seconds,
        front,
        back,
        costs,
        schedule.placement,
        fewest,
        lambda cut: described.totals(described.with_prediction(cut)),
    )
    best = shortest(schedule, row, present, described.capacity(described.with_prediction(present), free))
    if best.gain < _WORTH:
        return None
    return described.spelled(described.with_prediction(best.cut)), best


def divided(
    costs: Costs, sizes: Sequence[float], counts: Sequence[int]
) -> tuple[tuple[Seconds, ...], Seconds, Seconds]:
    """Return the seconds of every layer, and of the first and the last stage's other work.

    Stage s has ``counts[s]`` layers, which share its seconds in ``costs`` in proportion to their ``sizes``.
    In the first and the last stage they take at most the time of layers of their size between these, by the
    median, or in the first stage where nothing is between.  The remainder is the embedding's or the loss's.
    """
    totals = [sum(sizes[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    *by_kind, saved = zip(*map(seconds_of, costs.stages), strict=True)
    rates, front, back = zip(*(_rates(took, totals) for took in by_kind), strict=True)
    # All of a stage saves in proportion to its I.
    parts = [saving / stage.input_gradient for saving, stage in zip(saved, costs.stages, strict=True)]
    rates = *rates, [part * rate for part, rate in zip(parts, rates[1], strict=True)]
    front, back = (*front, parts[0] * front[1]), (*back, parts[-1] * back[1])
    by_stage = list(zip(*rates, strict=True))
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    seconds = [
        tuple(rate * size for rate in by_stage[stage]) for stage, size in zip(stages, sizes, strict=True)
    ]
    return tuple(seconds), front, back


def _rates(took: Sequence[float], totals: Sequence[float]) -> tuple[list[float], float, float]:
    """Return each stage's seconds for a layer of size 1, and the seconds of embedding and output head."""

    def extra(end: int) -> float:
        if not totals[end]:
            return took[end]
        return took[end] - usual * totals[end] if took[end] / totals[end] > usual else 0.0

    rates = [
        stage_seconds / total if total else 0.0 for stage_seconds, total in zip(took, totals, strict=True)
    ]
    usual = median([rate for rate in rates[1:-1] if rate] or [rates[0] or inf])
    front, back = extra(0), extra(-1)
    rates[0], rates[-1] = min(rates[0], usual), min(rates[-1], usual)
    return rates, front, back
