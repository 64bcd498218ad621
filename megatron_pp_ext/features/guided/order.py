"""Compiles an order from measured costs, in place of the one that was requested."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.limits import Budget
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import FLEX
from megatron_pp_ext.schedule.simulate import simulate


def shorter(source: Source, current: Schedule, measured: Costs, free: Sequence[float]) -> Schedule:
    """Compile the shortest schedule for ``measured`` costs that may replace ``current``.

    ``source`` has made ``current``.  Raises ``InfeasibleLimit`` where no order keeps what it may
    (``may_keep``).
    """
    budget = may_keep(source, current, measured, free)
    request = Request(FLEX, (current.placement,), current.microbatches, True, limit=budget)
    return make(request, lambda stages, is_shared: measured).schedule


def may_keep(source: Source, current: Schedule, measured: Costs, free: Sequence[float]) -> Budget:
    """Return the limits of a schedule that replaces ``current``, at the ``measured`` costs of the stages.

    It is the limit requested of ``flex``, all that is ``free`` under ``auto``, else the peak of ``current``
    on each rank.
    """
    can = catalog.abilities(source.name)
    if can.takes_limit:
        return source.settled.budget(measured)
    if can.measures_memory:
        return replace(source.settled, free=tuple(free)).budget(measured)
    return Budget(simulate(current, measured).peak_memory)
