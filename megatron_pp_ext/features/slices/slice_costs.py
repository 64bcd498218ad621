"""What units cost: time by their tokens and by the pairs of tokens of attention, memory by their tokens.

A slice attends to the slices before it, so the squares of a unit (``Unit.squares``) take the place of those
of whole documents.  Small units reach a lower rate: each takes as long as if it had ``overhead`` tokens more.
"""

from dataclasses import replace

import numpy as np

from megatron_pp_ext.features.lengths.durations import Durations, in_whole_numbers
from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.slices.problem import Floats, Work
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.unit_costs import UnitCosts


def unit_costs(units: Units, rates: LengthCosts, overhead: float = 0.0) -> UnitCosts:
    """Return the costs of a step of ``units``, whose stages are those of ``rates``.

    ``overhead`` are the tokens that a unit costs on top of its own, of which nothing is kept.  Messages take
    as long as those of a mean unit.
    """

    def of(tokens: float, squares: float) -> Costs:
        stages = tuple(
            replace(
                stage.costs(tokens + overhead, squares),
                activation=stage.activation * tokens,
                released_by_input_gradient=stage.released * tokens,
                copy=stage.copy * tokens,
            )
            for stage in rates.stages
        )
        return Costs(stages)

    count = len(units)
    share = units.microbatches / count
    mean = of(sum(units.tokens) / count, sum(units.squares) / count)
    return UnitCosts(
        mean.stages,
        rates.hop * share,
        rates.message * share,
        units=tuple(map(of, units.tokens, units.squares)),
        tokens=units.tokens,
    )


def work_of(
    units: Units, rates: LengthCosts, placement: Placement, splits_backward: bool, overhead: float = 0.0
) -> Work:
    """Return the same as arrays, for stages as in ``placement``."""
    tokens, squares = np.array(units.tokens, float), np.array(units.squares, float)
    per_token = np.array([stage.per_token for stage in rates.stages]).T
    per_square = np.array([stage.per_square for stage in rates.stages]).T
    seconds = per_token[:, :, None] * (tokens + overhead) + per_square[:, :, None] * squares
    kept = np.array([stage.activation for stage in rates.stages])[:, None] * tokens
    released = np.array([stage.released for stage in rates.stages])[:, None] * tokens
    if not splits_backward:
        seconds[1] += seconds[2] - _hidden(units, rates, seconds, overhead)
        released = kept.copy()
    hop = rates.hop * units.microbatches / len(units)
    delays = [0.0 if placement.is_local(stage) else hop for stage in range(placement.stages - 1)]
    return Work(seconds, kept, released, np.array(delays), int(splits_backward))


def durations_of(units: Units, rates: LengthCosts, placement: Placement, overhead: float = 0.0) -> Durations:
    """Return the times of the actions of ``units`` as ``Schedule.durations`` has them."""
    alone = work_of(units, rates, placement, True, overhead).seconds
    whole = alone[1] + alone[2] - _hidden(units, rates, alone, overhead)
    return in_whole_numbers(np.stack([*alone, whole], axis=1).reshape(-1, len(units)))


def _hidden(units: Units, rates: LengthCosts, seconds: Floats, overhead: float) -> Floats:
    """Return what a W hides of its I: stages x units, no more than either takes in ``seconds``."""
    per_token = np.array([stage.hidden for stage in rates.stages])[:, None]
    return np.minimum(per_token * (np.array(units.tokens, float) + overhead), seconds[1:].min(axis=0))


def equal_work(units: Units, costs: Costs, placement: Placement) -> Work:
    """Return the work of units that all have these ``costs``, which are of the stages of ``placement``."""
    stages = [stage.charged_to_forward for stage in costs.stages]
    of_stages = [(one.forward, one.input_gradient, one.weight_gradient) for one in stages]
    each = np.ones(len(units))
    delays = [0.0 if placement.is_local(stage) else costs.hop for stage in range(placement.stages - 1)]
    return Work(
        np.array(of_stages).T[:, :, None] * each,
        np.array([stage.activation for stage in stages])[:, None] * each,
        np.array([stage.released_by_input_gradient for stage in stages])[:, None] * each,
        np.array(delays),
        1,
    )


def of_equal_slices(costs: Costs, slices: int) -> Costs:
    """Return the costs of a unit where all have the same, one of so many ``slices`` of a microbatch.

    Each takes and keeps its part of what ``costs`` say of a microbatch; weights stay what they are.
    """
    stages = tuple(
        replace(
            stage,
            forward=stage.forward / slices,
            input_gradient=stage.input_gradient / slices,
            weight_gradient=stage.weight_gradient / slices,
            activation=stage.activation / slices,
            released_by_input_gradient=stage.released_by_input_gradient / slices,
            copy=stage.copy / slices,
            hidden=stage.hidden / slices,
            workspace=stage.workspace / slices,
            workspace_in_whole=stage.workspace_in_whole / slices,
        )
        for stage in costs.stages
    )
    shared = costs.head
    if shared is not None:
        shared = replace(
            shared,
            scores=shared.scores / slices,
            weight_gradient=shared.weight_gradient / slices,
            activation=shared.activation / slices,
            hidden=shared.hidden / slices,
            sums=shared.sums / slices,
        )
    return replace(costs, stages=stages, hop=costs.hop / slices, message=costs.message / slices, head=shared)
