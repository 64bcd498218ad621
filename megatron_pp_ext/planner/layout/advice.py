"""The layout with which stages that were measured would make a shorter pipeline."""

from argparse import Namespace
from itertools import accumulate, pairwise
from statistics import median

from megatron_pp_ext.planner.layout.layer_row import LayerRow, Numbers, numbers
from megatron_pp_ext.planner.layout.rows import Found, shortest
from megatron_pp_ext.planner.step.layer_costs import LayerCosts
from megatron_pp_ext.planner.step.model_state import padded_vocabulary
from megatron_pp_ext.planner.step.stage_parts import pieces
from megatron_pp_ext.request import layers
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

_WORTH = 0.01
"""The part of the makespan that another layout has to save to be advised."""


def advised(args: Namespace, costs: Costs, schedule: Schedule) -> tuple[str, Found] | None:
    """Return a layout that is shorter than that of ``args`` by a hundredth at least, or None.

    ``costs`` are those of the stages of ``schedule``.  No rank keeps more activations than the fullest does
    now.  Nothing is advised for a model that is cut by its pattern, or with multi-token prediction in another
    stage than the loss.
    """
    stages = schedule.placement.stages
    if layers.pattern(args) or layers.predicting_stage(args, stages) not in (None, stages - 1):
        return None
    known = tuple(layers.by_stage(args, stages))
    row = _row(args, costs, schedule, known)
    if row is None:
        return None
    found = shortest(schedule, row, known)
    if found.gain < _WORTH:
        return None
    described = ["t" * count for count in found.cut]
    described[0] = "E" + described[0]
    described[-1] += "m" * (layers.value(args, "--mtp-num-layers") or 0) + "L"
    return layers.spelled(described), found


def _row(args: Namespace, costs: Costs, schedule: Schedule, known: tuple[int, ...]) -> LayerRow | None:
    """Return the layers with costs in proportion to their operations; None where only the last stage has any.

    What a layer costs for each operation is the median of all stages but the last.  What the ends of the
    model take beyond that for their layers is the embedding's and the loss's.
    """
    model = pieces(args, LayerCosts(args), padded_vocabulary(args))
    sizes = [part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
             for part in model.layers]  # fmt: skip
    by_stage = [sum(sizes[first:end]) for first, end in pairwise([0, *accumulate(known)])]
    measured = list(map(numbers, costs.stages))
    pairs = [(own, size) for own, size in zip(measured[:-1], by_stage, strict=False) if size]
    if not pairs:
        return None
    rates = [median(own[kind] / size for own, size in pairs) for kind in range(len(measured[0]))]

    def beyond(stage: int) -> Numbers:
        return tuple(
            max(0.0, own - rate * by_stage[stage]) for own, rate in zip(measured[stage], rates, strict=True)
        )

    front, back = beyond(0), beyond(-1)
    least = [1] * len(known)
    for stage, end in ((0, front), (-1, back)):
        least[stage] = min(known[stage], int(not all(end[:3])))
    return LayerRow(
        tuple(tuple(rate * size for rate in rates) for size in sizes),
        front,
        back,
        costs,
        schedule,
        tuple(least),
    )
