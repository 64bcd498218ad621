"""The request for an order that is compiled from measured steps of its own run, and the compiling of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.limits import Budget
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.simulate import simulate

_STEPS = "--pipeline-profile-steps"


@dataclass(frozen=True, slots=True)
class ProfileSteps(Option):
    """Training steps to measure, counted from 1, the last one included.

    A better schedule is compiled from them.  Whole backwards come in two halves there, so that each half has
    a duration.
    """

    first: int
    last: int

    splits_backward = True

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def number(self) -> int:
        return self.last - self.first + 1

    @property
    def measured_by(self) -> str:
        return f"{_STEPS} {self}"

    @property
    def until(self) -> str:
        return f"until steps {self} are measured"


def profile_steps(text: str, train_iters: int | None) -> ProfileSteps:
    """Return the steps that --pipeline-profile-steps requests; ValueError where there are none."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None:
        raise ValueError(f"{_STEPS} needs two numbers of training steps such as 5-10, got {text!r}")
    steps = ProfileSteps(*map(int, match.groups()))
    if steps.first < 1:
        raise ValueError(f"{_STEPS} {text} starts before the first step; set it to 1-{max(1, steps.last)}")
    if steps.last < steps.first:
        raise ValueError(f"{_STEPS} {text} ends before it starts; set it to {steps.last}-{steps.first}")
    if train_iters is not None and steps.last >= train_iters:
        raise ValueError(
            f"{_STEPS} {text} leaves no step of --train-iters {train_iters} for the schedule compiled "
            "from them; let it end earlier"
        )
    return steps


def shorter(source: Source, current: Schedule, measured: Costs, free: Sequence[float]) -> Schedule:
    """Compile the shortest schedule for ``measured`` costs that may replace ``current``.

    ``source`` has made ``current``.  Raises ``InfeasibleLimit`` where no order keeps what it may
    (``may_keep``).
    """
    budget = may_keep(source, current, measured, free)
    request = Request(FLEX, (current.placement,), current.microbatches, True, limit=budget)
    return make(request, CostModel.fixed(measured)).schedule


def may_keep(source: Source, current: Schedule, measured: Costs, free: Sequence[float]) -> Budget:
    """Return the limits of a schedule that replaces ``current``, at the ``measured`` costs of the stages.

    It is the limit requested of ``flex``, all that is ``free`` under ``auto``, else the peak of ``current``
    on each rank.
    """
    can = catalog.abilities(source.name)
    if can.takes_limit:
        return source.resolved.budget(measured)
    if can.measures_memory:
        return replace(source.resolved, free=tuple(free)).budget(measured)
    return Budget(simulate(current, measured).peak_memory)
