"""The costs of the stages of a pipeline, from recorded steps of it."""

from collections.abc import Sequence
from statistics import median

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.idle_time import message_seconds
from megatron_pp_ext.schedule.recorded import RecordedStep, head_costs, kind_seconds, stage_costs

_SHORTEST = 1e-9
"""The shortest duration in seconds; costs must be above zero and clocks resolve no less."""


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """Return the costs measured in ``steps`` of one placement, in which all backwards are split in halves.

    Bytes are taken from the first step, the only one that must have counted them.  Seconds are medians over
    all microbatches of the other steps, where there are others, since counting takes time.  The P2P latency
    is the median time under way of the messages for which their receiver was waiting.
    """
    first, *later = steps
    timed = later or [first]
    seconds = kind_seconds(
        (record for step in timed for record in step.records),
        lambda durations: max(_SHORTEST, median(durations)),
    )
    latencies = [seconds for step in timed for seconds in message_seconds(step)]
    placement = first.placement
    return Costs(
        tuple(
            stage_costs(stage, seconds, first.records[placement.rank_of(stage)])
            for stage in range(placement.stages)
        ),
        max(0.0, median(latencies)) if latencies else 0.0,
        head=head_costs(first.records) if placement.splits_head else None,
    )


def costs_by_microbatch(step: RecordedStep) -> tuple[Costs, ...]:
    """Return the costs of each microbatch of ``step``, in whose record all backwards are split in halves.

    Activations are not counted.
    """
    seconds: dict[int, dict[tuple[int, Kind], float]] = {}
    for record in step.records:
        for action, start, end, *_ in record.events:
            of_microbatch = seconds.setdefault(action.microbatch, {})
            of_microbatch[action.stage, action.kind] = max(_SHORTEST, end - start)
    stages = range(step.placement.stages)
    return tuple(
        Costs(tuple(stage_costs(stage, seconds[number]) for stage in stages)) for number in sorted(seconds)
    )
