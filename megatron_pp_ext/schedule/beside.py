"""Which W lends its products to an I, to run while the I's own messages travel.

A whole backward computes a layer's weight gradient while the gradient of the layer's input is on its way to
the other tensor-parallel ranks.  An I has no such product of its own: it takes the products of the next W of
its rank, whose own I has come before, or is this very one.  At most the rank's parts of a split head, S and
T, come between the two.  The order of actions stays as it is.

A W that comes after a forward could lend as well.  But an I with products inside ends later, for which other
ranks wait, and no family takes less time then.
"""

from collections.abc import Sequence

from megatron_pp_ext.schedule.action import Action, Kind


def lenders(order: Sequence[Action], paired: frozenset[Action]) -> list[tuple[int, int]]:
    """Return the places (of I, of W) in a rank's ``order`` of each I that runs products of a W.

    No I after the rank's last F does: other ranks wait for its output, and products inside would delay that.
    The last I of a stage takes none and its last W lends none, since gradients are complete with them.  Nor
    does a W lend to an I that is ``paired`` with a forward.
    """
    last = {(action.stage, action.kind): place for place, action in enumerate(order)}
    last_forward = max((place for (_, kind), place in last.items() if kind is Kind.F), default=0)
    place_of = {action: place for place, action in enumerate(order) if action.kind is Kind.I}
    lent = []
    latest = 0  # the last action that is no part of a split head
    for place, action in enumerate(order):
        input = order[latest]
        if action.kind is Kind.W and input.kind is Kind.I:
            is_last = place == last[action.stage, Kind.W] or latest == last[input.stage, Kind.I]
            is_ready = place_of[action._replace(kind=Kind.I)] <= latest < last_forward
            if is_ready and not is_last and not (latest and order[latest - 1] in paired):
                lent.append((latest, place))
        if action.kind not in (Kind.S, Kind.T):
            latest = place
    return lent
