"""PipeDream's 1F1B without a flush (SOSP 2019, figures 4 and 8), and how old its weights are.

The order is 1F1B's, over all microbatches of the whole run: after the first fill a rank alternates
between one forward and one backward for ever.  A stage updates its weights after every ``interval``
microbatches without waiting for another stage; where it has r replicas (``round_robin``), each does an r-th
of these microbatches, and they add up their gradients.  A training step is a rank's work between two of
its updates; microbatches in flight at an update stay in flight.

Microbatches are numbered through the run.  Version v of a stage's weights are its weights
after v updates.  ``interval`` 1 with the latest weights is PipeDream; ``interval`` >= p with the weights
before the latest update is PipeDream-2BW (arXiv 2006.09503, section 3.1).
"""

from enum import StrEnum

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.families.round_robin import Replicas


class WeightVersion(StrEnum):
    """The version of its weights that a stage uses for a microbatch, in the forward and the backward."""

    LATEST = "latest"
    """The newest at the time of the forward: PipeDream's weight stashing."""
    SAME = "same"
    """On all stages the version that was the first stage's newest: PipeDream's vertical sync."""
    PREVIOUS = "previous"
    """On all stages the version before that which the microbatch's own update starts from: 2BW.

    The first stage has it in time only if interval >= p - 1, where p is the number of all replicas.
    """


def step(replicas: Replicas, interval: int, update: int, updates: int) -> tuple[tuple[Action, ...], ...]:
    """Return the order of each rank between updates number ``update`` and ``update + 1``, of ``updates``.

    Update 0 fills the pipeline; the last ones start no forward whose backward would not be reached.
    The backwards are of the ``interval`` microbatches of this update; the forwards of a replica are
    ahead of them by its ``warm_up``.  No action needs one of a later update: the forwards of a stage are at
    least as far ahead as the next stage's.

    ValueError for an update that is not there, and where replicas would do unequally many microbatches.
    """
    replicas.require_turns(interval)
    if not 0 <= update < updates:
        raise ValueError(f"update must be in 0..{updates - 1}, got {update}")
    return tuple(_order(replicas, rank, interval, update, updates) for rank in range(replicas.ranks))


def _order(replicas: Replicas, rank: int, interval: int, update: int, updates: int) -> tuple[Action, ...]:
    stage = replicas.stage_of(rank)
    ahead, per_update = replicas.warm_up(stage), interval // replicas.counts[stage]
    microbatches = replicas.turns(rank, interval * updates)
    order = []
    if update == 0:
        order += [Action(stage, Kind.F, microbatch) for microbatch in microbatches[:ahead]]
    for turn in range(update * per_update, (update + 1) * per_update):
        if turn + ahead < len(microbatches):
            order.append(Action(stage, Kind.F, microbatches[turn + ahead]))
        order.append(Action(stage, Kind.B, microbatches[turn]))
    return tuple(order)


def version(weights: WeightVersion, microbatch: int, stage: int, replicas: Replicas, interval: int) -> int:
    """Return the version of ``stage``'s weights that ``microbatch`` uses.

    For n stages and an update every microbatch this is w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ...,
    w_n(t)) under LATEST, f(w(t-n+1)) under SAME; for 2BW w(t+1) = w(t) - lr * grad f(w(t-1)).
    """
    if weights is WeightVersion.PREVIOUS:
        return max(0, microbatch // interval - 1)
    stage = 0 if weights is WeightVersion.SAME else stage
    count = replicas.counts[stage]
    return max(0, (microbatch // count - replicas.warm_up(stage)) // (interval // count))


def versions_kept(
    weights: WeightVersion, update: int, stage: int, replicas: Replicas, interval: int
) -> range:
    """Return the versions older than ``update`` that ``stage`` still needs after that many updates.

    They are those of all microbatches in flight or yet to come: at most ceil(in flight / interval) under
    LATEST, and one under PREVIOUS if interval >= p - 1.
    """
    return range(version(weights, update * interval, stage, replicas, interval), update)


def most_versions(weights: WeightVersion, stage: int, replicas: Replicas, interval: int) -> int:
    """Return how many versions in addition to the newest ``stage`` keeps once the pipeline is full."""
    return len(versions_kept(weights, replicas.ranks, stage, replicas, interval))
