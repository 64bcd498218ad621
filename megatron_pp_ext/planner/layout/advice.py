"""The layout with which stages that were measured would make a shorter pipeline."""

from argparse import Namespace
from collections.abc import Sequence

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.layout.layer_row import LayerRow
from megatron_pp_ext.planner.layout.measured_layers import divided
from megatron_pp_ext.planner.layout.model_row import ModelRow
from megatron_pp_ext.planner.layout.rows import Shortest, shortest
from megatron_pp_ext.planner.step.model_parts import model_parts
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

_WORTH = 0.01
"""The part of the makespan that another layout has to save to be advised."""


def advised(
    args: Namespace, data: int, costs: Costs, schedule: Schedule, name: str, free: float = 0.0
) -> tuple[str, Shortest] | None:
    """Return a layout that is shorter than that of ``args`` by a hundredth at least, or None.

    ``costs`` are those of the stages of ``schedule``, which is called ``name``, and ``data`` is the
    data-parallel size.  ``free`` are the bytes that the fullest device leaves for activations and messages.
    By estimate no rank needs more than that, or than the fullest one needs now.  Nothing is advised for a
    model that is cut by its pattern, or with multi-token prediction in another stage than the loss.
    ValueError for layers that cannot be estimated.
    """
    stages = schedule.placement.stages
    if layers.pattern(args) or layers.predicting_stage(args, stages) not in (None, stages - 1):
        return None
    known = tuple(layers.by_stage(args, stages))
    model = model_parts(Job.of(args))
    described = ModelRow(args, model, data, schedule, name)

    def with_prediction(cut: Sequence[int]) -> Cut:
        return *cut[:-1], cut[-1] + described.items - len(model.layers)

    sizes = [part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
             for part in model.layers]  # fmt: skip
    seconds, front, back = divided(costs, sizes, known)
    least = [*described.least]
    for end, beside in ((0, front), (-1, back)):
        least[end] = max(least[end], int(not all(beside)))
    fewest = tuple(map(min, least, known))
    row = LayerRow(
        seconds,
        front,
        back,
        costs,
        schedule.placement,
        fewest,
        lambda cut: described.totals(with_prediction(cut)),
    )
    best = shortest(schedule, row, known, described.capacity(with_prediction(known), free))
    if best.gain < _WORTH:
        return None
    return described.stages.spelled(with_prediction(best.cut)), best
