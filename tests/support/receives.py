"""Where the receives of messages are posted."""

from megatron_pp_ext.schedule.actions import Orders
from megatron_pp_ext.schedule.messages import Arrival, planned_launches


def posted_receives(orders: Orders) -> list[list[tuple[Arrival, ...]]]:
    """Return the receives among ``planned_launches``."""
    return [
        [tuple(one for one in launches if isinstance(one, Arrival)) for launches in of_rank]
        for of_rank in planned_launches(orders)
    ]
