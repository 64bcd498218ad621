"""Which W lends its products to an I, to run while the I's own tensor-parallel messages travel.

A whole backward computes a layer's weight gradient while the gradient of the layer's input is on its way to
the other tensor-parallel ranks.  An I has no such product of its own: it takes those of the next W of its
rank, whose own I has come before, or is this very one.  The order of actions stays as it is.  A later I of
the same W takes what earlier ones have left.
"""

from collections.abc import Sequence

from megatron_pp_ext.schedule.action import Action, Kind


def lenders(
    order: Sequence[Action], paired: frozenset[Action], is_next: bool = False
) -> list[tuple[int, int]]:
    """Return the places (of I, of W) in a rank's ``order`` of each I that runs products of a W.

    With ``is_next`` the W has to be right after the I.  No I after the rank's last F has any: other ranks
    wait for its output, and products inside would delay that.  The last I of a stage takes none and its last
    W lends none, since gradients are complete with them.  Nor does a W lend past a B, which adds to the same
    sums, or to an I that is ``paired`` with a forward.
    """
    last_forward = max((place for place, action in enumerate(order) if action.kind is Kind.F), default=0)
    last = {(action.stage, action.kind): place for place, action in enumerate(order)}
    place_of = {action: place for place, action in enumerate(order) if action.kind is Kind.I}
    found: list[tuple[int, int]] = []
    lender = -1
    for place in reversed(range(len(order))):
        stage, kind, _ = order[place]
        if kind is Kind.W:
            lender = -1 if place == last[stage, kind] else place
        elif kind is Kind.B:
            lender = -1
        elif kind is Kind.I and lender >= 0 and place < min(last_forward, last[stage, kind]):
            of_lender = Action(order[lender].stage, Kind.I, order[lender].microbatch)
            is_paired = place > 0 and order[place - 1] in paired
            if place_of[of_lender] <= place and not is_paired and not (is_next and lender > place + 1):
                found.append((place, lender))
    return found[::-1]
