"""DualPipeV: forwards and backwards of different microbatches in pairs (DeepSeek; DualPipe of arXiv
2412.19437, folded into the V placement).

In the steady state a rank always has the forward of one microbatch and the backward of another
before it, so that one's computation can hide the other's communication between experts.  Only
the order is taken over: the two of a pair run one after the other.  Rank r, which holds chunk 0 and
chunk 1, goes through eight phases:

1. F0 until the first microbatch is back from the last rank:           2(p - r - 1) times
2. F0 F1, as microbatches come back:                                   r + 1
3. I1 W F1, memory is full, a chunk must go before one comes:          p - r - 1
4. F0 B1 F1 B0, the pairs of the steady state:                         m - 2p + r + 1
5. B1 F1 B0, no F0 left:                                               p - r - 1
6. B1 B0, from the middle on I1 I0, gradients for other ranks first:   r + 1
7. W I0:                                                               p - r - 1
8. W, what is left:                                                    r + 1

W is the oldest one that waits, of either chunk.
"""

from megatron_pp_ext.schedule.actions import Action, Schedule
from megatron_pp_ext.schedule.families.phases import order_of
from megatron_pp_ext.schedule.families.requirements import require_pipeline
from megatron_pp_ext.schedule.placement import Placement, v


def build(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV for any ranks >= 2 and microbatches >= 1.

    At unit cost and m >= 2p: makespan 6m + p - 1, peak 2p + 1 chunks.  With fewer microbatches
    than 2p, which DeepSeek's own code refuses, it is the order for 2p with the missing ones left out:
    no rank then waits for anything it did not wait for before.
    """
    require_pipeline("dualpipe-v", ranks, microbatches)
    placement = v(ranks)
    whole = max(microbatches, 2 * ranks)
    orders = (_order(rank, placement, whole) for rank in range(ranks))
    kept = tuple(tuple(action for action in order if action.microbatch < microbatches) for order in orders)
    return Schedule("dualpipe-v", placement, microbatches, kept)


def _order(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    above, half, odd = placement.ranks - rank - 1, (rank + 1) // 2, (rank + 1) % 2
    phases = (
        ("F0", 2 * above),
        ("F0 F1", rank + 1),
        ("I1 W F1", above),
        ("F0 B1 F1 B0", microbatches - 2 * placement.ranks + rank + 1),
        ("B1 F1 B0", above),
        *(("B1 B0", half), ("B1 I0", odd), ("I1 I0", half)),
        ("W I0", above),
        ("W", rank + 1),
    )
    return order_of(phases, rank, placement)
