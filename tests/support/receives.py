"""Where the receives of messages are posted."""

from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.announcements import Announced, RankOf
from megatron_pp_ext.schedule.messages import Arrival, planned_launches
from megatron_pp_ext.schedule.program import Orders


def posted_receives(
    orders: Orders,
    stages: int,
    rank_of: RankOf,
    paired: frozenset[Action] = frozenset(),
    announced: Announced = Announced.NOTHING,
) -> list[list[tuple[Arrival, ...]]]:
    """Return the receives among ``planned_launches``."""
    return [
        [tuple(launch for launch in launches if isinstance(launch, Arrival)) for launches in of_rank]
        for of_rank in planned_launches(orders, stages, rank_of, paired, announced=announced)
    ]
