"""Evaluation: forwards alone, for any placement.

There is one rule: of the forwards whose input is there, a rank runs the deepest stage's.  Any
choice would take the same time; this one drains microbatches before it admits more, so that few
activations lie between the chunks, whatever m is.  With a loop it is Megatron-LM's order (groups of p
microbatches), without its condition that p divides m.
"""

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.entry import FORWARD_ONLY, require_pipeline
from megatron_pp_ext.schedule.placement import Placement


def build(placement: Placement, microbatches: int) -> Schedule:
    """Build all forwards of ``microbatches`` microbatches, in an order in which no rank waits for ever.

    The pipeline is run on paper, a tick a forward: in each tick every rank takes the deepest of its
    stages that has an input waiting.  What could be run that way is a valid order.
    """
    require_pipeline(FORWARD_ONLY, placement.ranks, microbatches)
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    arrived = [0] * placement.stages
    arrived[0] = microbatches
    done = [0] * placement.stages
    deepest_first = [placement.stages_of(rank)[::-1] for rank in range(placement.ranks)]
    while done[-1] < microbatches:
        running = [
            next((stage for stage in stages if done[stage] < arrived[stage]), None)
            for stages in deepest_first
        ]
        for rank, stage in enumerate(running):
            if stage is None:
                continue
            orders[rank].append(Action(stage, Kind.F, done[stage]))
            done[stage] += 1
            if stage + 1 < placement.stages:
                arrived[stage + 1] += 1
    return Schedule(FORWARD_ONLY, placement, microbatches, tuple(map(tuple, orders)))
