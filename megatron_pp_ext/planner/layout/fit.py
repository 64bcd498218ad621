"""Moves items out of ranks that need more memory than there is."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_pp_ext.planner.layout.cut import Cut, Moves, Seconds, moved, times, work_of_ranks
from megatron_pp_ext.schedule.placement import Placement

_TRIALS = 64
"""The cuts whose memory is looked at; a model that fits nearly needs a few."""


def fitted(
    cut: Cut,
    placement: Placement,
    seconds: Seconds,
    totals: Callable[[Cut], Sequence[float]],
    limit: float,
    least: Sequence[int],
) -> Cut | None:
    """Return ``cut`` with items moved until no rank needs more than ``limit``; None where that is not found.

    ``totals`` returns the bytes of every rank.  An item of the fullest rank goes where the ranks' seconds
    stay most even, among the places that have room for it.
    """
    now, work, left = totals(cut), work_of_ranks(placement), _TRIALS
    moves_of = Moves(seconds, least)
    while (excess := _excess(now, limit)) > 0:
        loads = np.einsum("psk,sk->p", work, times(cut, seconds))
        after = ((loads[:, None, None] + moves_of.changes(work, cut)) ** 2).sum(axis=0)
        fullest = int(np.argmax(now))
        moves = sorted(
            (after[source, target], source, target)
            for source in placement.stages_of(fullest)
            for target in range(len(cut))
            if placement.rank_of(target) != fullest and np.isfinite(after[source, target])
        )
        for _, source, target in moves:
            if now[placement.rank_of(target)] >= limit:
                continue
            if not left:
                return None
            left -= 1
            other = moved(cut, source, target)
            then = totals(other)
            if _excess(then, limit) < excess:
                cut, now = other, then
                break
        else:
            return None
    return cut


def _excess(totals: Sequence[float], limit: float) -> float:
    return sum(max(0.0, total - limit) for total in totals)
