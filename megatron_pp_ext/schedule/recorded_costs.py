"""What the stages of a pipeline cost, from recorded steps of it."""

from collections.abc import Sequence
from statistics import median

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.idle_time import flights
from megatron_pp_ext.schedule.recorded import RankRecord, RecordedStep

_SHORTEST = 1e-9
"""Seconds; a cost must be above zero, and no clock tells less."""


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """The costs behind ``steps``, whose backwards all come in halves; one placement throughout.

    Bytes are those of the first step, which alone must have counted them; seconds are medians over all
    microbatches of the others, where there are others, since counting takes time.  The hop is the median
    flight of the messages for which their receiver was waiting.
    """
    first, *others = steps
    timed = others or [first]
    hops = [seconds for step in timed for seconds in flights(step)]
    return Costs(
        tuple(_stage(stage, first, timed) for stage in range(first.placement.stages)),
        max(0.0, median(hops)) if hops else 0.0,
    )


def _stage(stage: int, counted: RecordedStep, timed: Sequence[RecordedStep]) -> StageCosts:

    def seconds(kind: Kind) -> float:
        found = (
            event.end - event.start
            for step in timed
            for event in step.records[step.placement.rank_of(stage)].events
            if event.action.stage == stage and event.action.kind is kind
        )
        return max(_SHORTEST, median(found))

    activation, released = kept_bytes(counted.records[counted.placement.rank_of(stage)], stage)
    return StageCosts(
        forward=seconds(Kind.F),
        input_gradient=seconds(Kind.I),
        weight_gradient=seconds(Kind.W),
        activation=activation,
        released_by_input_gradient=released,
    )


def kept_bytes(record: RankRecord, stage: int) -> tuple[float, float]:
    """What a microbatch of ``stage`` keeps from its forward on, and what its input gradient gives back of it.

    Medians of a rank's ``record`` that counts bytes.  Where an I keeps more than it gives back, as under
    recomputation, the forward is charged with that.  A whole backward gives all back at its end.
    """
    growths: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    before = 0
    for event in record.events:
        if event.action.stage == stage:
            growths[event.action.kind].append(event.live_bytes - before)
        before = event.live_bytes
    after_forward = median(growths[Kind.F])
    if not growths[Kind.I]:
        return after_forward, 0.0
    after_input_gradient = max(0.0, after_forward + median(growths[Kind.I]))
    activation = max(after_forward, after_input_gradient)
    return activation, activation - after_input_gradient
