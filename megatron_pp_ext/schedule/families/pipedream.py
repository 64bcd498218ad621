"""PipeDream's 1F1B without a flush (SOSP 2019, figure 4), and how old its weights are.

The order is 1F1B's, over all microbatches of the whole run: after the first fill a rank alternates
between one forward and one backward for ever, and updates its weights after every ``interval``
backwards without waiting for another rank.  A training step is what a rank does between two of its
updates; what is in flight at an update stays in flight.

Microbatches are numbered through the run.  Version v of a stage's weights are its weights
after v updates.  ``interval`` 1 with the latest weights is PipeDream; ``interval`` >= p with those of
the update before is PipeDream-2BW (arXiv 2006.09503, section 3.1).
"""

from enum import StrEnum

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.families.requirements import require_pipeline
from megatron_pp_ext.schedule.placement import linear


class Weights(StrEnum):
    """The version of its weights that a stage uses for a microbatch, in the forward and the backward."""

    LATEST = "latest"
    """The newest at the time of the forward: PipeDream's weight stashing."""
    SAME = "same"
    """On all stages the version that was the first stage's newest: PipeDream's vertical sync."""
    PREVIOUS = "previous"
    """On all stages the version before that which the microbatch's own update starts from: 2BW.

    The first stage has it in time only if interval >= p - 1.
    """


def step(ranks: int, interval: int, update: int, updates: int) -> Schedule:
    """Build what every rank does between its updates number ``update`` and ``update + 1``, of ``updates``.

    Update 0 fills the pipeline; the last ones start no forward whose backward would not be reached.
    A rank's backwards are those of the ``interval`` microbatches of this update; its forwards are ahead
    of them by ``in_flight`` microbatches.
    """
    require_pipeline("pipedream", ranks, interval)
    if not 0 <= update < updates:
        raise ValueError(f"update must be in 0..{updates - 1}, got {update}")
    orders = tuple(_order(rank, ranks, interval, update, updates) for rank in range(ranks))
    return Schedule("pipedream", linear(ranks), interval, orders)


def _order(rank: int, ranks: int, interval: int, update: int, updates: int) -> tuple[Action, ...]:
    ahead, end = in_flight(rank, ranks), updates * interval
    order = []
    if update == 0:
        order += [Action(rank, Kind.F, microbatch) for microbatch in range(min(ahead, end))]
    for microbatch in range(update * interval, (update + 1) * interval):
        if microbatch + ahead < end:
            order.append(Action(rank, Kind.F, microbatch + ahead))
        order.append(Action(rank, Kind.B, microbatch))
    return tuple(order)


def in_flight(stage: int, ranks: int) -> int:
    """Return how many microbatches have passed ``stage`` and not yet come back when it updates."""
    return ranks - 1 - stage


def version(weights: Weights, microbatch: int, stage: int, ranks: int, interval: int) -> int:
    """Return the version of ``stage``'s weights that ``microbatch`` uses.

    For n stages and an update every microbatch this is w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ...,
    w_n(t)) under LATEST, f(w(t-n+1)) under SAME; for 2BW w(t+1) = w(t) - lr * grad f(w(t-1)).
    """
    match weights:
        case Weights.LATEST:
            age = (microbatch - in_flight(stage, ranks)) // interval
        case Weights.SAME:
            age = (microbatch - in_flight(0, ranks)) // interval
        case Weights.PREVIOUS:
            age = microbatch // interval - 1
    return max(0, age)


def versions_kept(weights: Weights, update: int, stage: int, ranks: int, interval: int) -> range:
    """Return the versions older than ``update`` that ``stage`` still needs after that many updates.

    They are those of all microbatches in flight or yet to come: at most ceil(in flight / interval) under
    LATEST, and one under PREVIOUS if interval >= p - 1.
    """
    return range(version(weights, update * interval, stage, ranks, interval), update)


def most_versions(weights: Weights, stage: int, ranks: int, interval: int) -> int:
    """Return how many versions beside the newest ``stage`` keeps once the pipeline is full."""
    return len(versions_kept(weights, ranks, stage, ranks, interval))
