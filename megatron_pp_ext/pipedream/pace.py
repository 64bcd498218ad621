"""Times a pipeline that never flushes, from update to update, until its pace is that of a long run."""

from collections.abc import Hashable, Sequence
from itertools import count

from megatron_pp_ext.schedule.actions import Action, delivers, needs
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.messages import outgoing_message
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.program import Program
from megatron_pp_ext.schedule.walk import Walk

_ROUNDING = 1e-9
"""The part of the longest forward to which times are rounded before they are compared."""

_LONGEST = 8
"""How many microbatches for each rank are gone through at most.

A pipeline that does not repeat itself by then is limited by two things that take nearly the same time, so
that its mean pace is that of either.
"""


def seconds_of_an_update(
    replicas: Replicas, interval: int, costs: Costs, updating: Sequence[float], all_wait: bool = False
) -> float:
    """Return the seconds from one update to the next, ``interval`` microbatches later, in a long run.

    ``costs`` are of the stages, and ``updating`` the seconds in which each stage reduces its gradients
    and updates its weights.  With ``all_wait`` all stages wait for each other at an update.  ValueError where
    the replicas would do unequally many microbatches.
    """
    running = _Running(replicas, interval, costs, updating, all_wait)
    times: list[float] = []
    update_with: dict[Hashable, int] = {}
    for update in count():
        running.next_update(update)
        times.append(running.time)
        before = update_with.setdefault(running.position(update), update)
        if before < update:
            return (times[update] - times[before]) / (update - before)
        if update > 1 and update * interval > _LONGEST * replicas.ranks:
            break
    half = len(times) // 2
    return (times[-1] - times[-1 - half]) / half


class _Running:
    """The times at which the ranks are free, and those at which the messages in flight have left."""

    def __init__(
        self, replicas: Replicas, interval: int, costs: Costs, updating: Sequence[float], all_wait: bool
    ) -> None:
        self._replicas, self._interval, self._costs = replicas, interval, costs
        self._together = [(replicas.ranks_of(stage), seconds) for stage, seconds in enumerate(updating)]
        if all_wait:
            self._together = [(range(replicas.ranks), max(updating))]
        self._unit = _ROUNDING * max(stage.forward for stage in costs.stages)
        self._free = [0.0] * replicas.ranks
        self._left: dict[Action, float] = {}

    @property
    def time(self) -> float:
        return self._free[0]

    def next_update(self, update: int) -> None:
        """Go on to the end of ``update``, whose number is one more than the last time."""
        replicas, placement = self._replicas, linear(self._replicas.stages)
        # So many updates are still to come that none lacks a forward.
        orders = pipedream.step(replicas, self._interval, update, update + replicas.ranks + 1)
        program = Program.of_orders(replicas.placed(orders), is_open=True)
        for number in Walk(program).line:
            rank, action = program.columns.rank[number], program.actions[number]
            for need in needs(action, placement):
                if need.stage != action.stage:
                    self._free[rank] = max(self._free[rank], self._left.pop(need) + self._costs.hop)
            self._free[rank] += self._costs.seconds(action)
            if outgoing_message(action, placement.stages) is not None:
                self._left[delivers(action)] = self._free[rank]
        for ranks, seconds in self._together:
            done = max(self._free[rank] for rank in ranks) + seconds
            for rank in ranks:
                self._free[rank] = done

    def position(self, update: int) -> Hashable:
        """Return the state of the pipeline after ``update``; from equal states it goes on the same way.

        Times count from the first rank's, and microbatches from the first one of the next update.
        """
        first = (update + 1) * self._interval
        return tuple(map(self._since, self._free)), frozenset(
            (stage, kind, microbatch - first, self._since(time))
            for (stage, kind, microbatch), time in self._left.items()
        )

    def _since(self, time: float) -> int:
        return round((time - self.time) / self._unit)
