"""The pass: the order of a schedule in slices of sequences."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_pp_ext.compiler.make import CostsOf, Made, Make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.schedule.actions import Action, Kind


def sliced(request: Request, costs: CostsOf, before: Make) -> Made:
    """Let every action be those of the slices of its microbatch, the backwards in reverse."""
    made = before(request)
    option = request.option(Slices)
    if option is None or option.count == 1:
        return made
    schedule, count = made.schedule, option.count
    orders = tuple(
        tuple(one for action in order for one in _of_slices(action, count)) for order in schedule.orders
    )
    return replace(
        made, schedule=replace(schedule, microbatches=schedule.microbatches * count, orders=orders)
    )


def _of_slices(action: Action, count: int) -> Iterator[Action]:
    numbers = range(count) if action.kind is Kind.F else reversed(range(count))
    for number in numbers:
        yield action._replace(microbatch=action.microbatch * count + number)
