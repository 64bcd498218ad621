"""A recorded step as it would have run with a core for every rank.

Where ranks share cores, an action also lasts while its rank waits for a core, and the ranks that need its
output wait with it: such a step shows the machine more than the schedule.  The processor time of an action
does not depend on how many ranks share a core, except through the caches, so the step is timed anew from
it: every rank works in its recorded order, and an action starts once its rank is free and its inputs exist.
Messages take no time.
"""

from dataclasses import replace

from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.orders import Orders
from megatron_pp_ext.schedule.program import WIRES, Program
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.schedule.walk import Walk


def on_own_cores(step: RecordedStep) -> RecordedStep:
    """Return ``step`` with each action as long as its processor time, on a clock that starts at 0.

    Its name states that it is replayed.  Without a flush, a recording may begin in the middle of
    microbatches; inputs from before it are there from the start.  Reductions of gradients are left out: they
    are not the work of the rank's thread.  Raises ValueError if the step has no processor times, because it
    ran on a device or was simulated.
    """
    seconds: dict[Action, float] = {}
    for record in step.records:
        for event in record.events:
            if event.processor_seconds is None:
                raise ValueError(
                    f"the step of {step.name} has no processor times, which are recorded on CPUs only: show "
                    "it without --processor-time, or record it on CPUs"
                )
            if record.paired:
                raise ValueError(
                    f"the step of {step.name} has pairs, whose two actions share one processor time: show it "
                    "without --processor-time"
                )
            seconds[event.action] = event.processor_seconds
    orders = [[event.action for event in record.events] for record in step.records]
    walk = Walk(Program.of_orders(Orders(orders, step.placement), is_open=True))
    alone = [seconds[action] for action in walk.program.actions]
    starts, ends = walk.times_of_each(alone, [0.0] * len(WIRES))
    steps = iter(walk.step_of)
    return replace(
        step,
        name=f"{step.name}, replayed",
        records=tuple(
            record._replace(
                events=tuple(
                    event._replace(start=starts[at], end=ends[at])
                    for event, at in zip(record.events, steps, strict=False)
                ),
                reductions=(),
                clock_error=0.0,
            )
            for record in step.records
        ),
    )
