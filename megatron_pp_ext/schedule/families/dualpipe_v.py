"""DualPipeV: forwards and backwards of different microbatches in pairs (DeepSeek; DualPipe of arXiv
2412.19437, folded into the V placement).

In the steady state a rank always has the forward of one microbatch and the backward of another
before it, so that one's computation can hide the other's communication between experts.  Without pairs
the two run one after the other.  Rank r, which holds chunk 0 and chunk 1, goes through eight phases:

1. F0 until the first microbatch is back from the last rank:           2(p - r - 1) times
2. F0 F1, as microbatches come back:                                   r + 1
3. I1 W F1, memory is full, a chunk must go before one comes:          p - r - 1
4. F0+B1 F1+B0, the pairs of the steady state:                         m - 2p + r + 1
5. B1 F1+B0, no F0 left:                                               p - r - 1
6. B1 B0, from the middle on I1 I0, gradients for other ranks first:   r + 1
7. W I0:                                                               p - r - 1
8. the remaining W:                                                    r + 1

W is the oldest one that waits, of either chunk.
"""

from dataclasses import replace
from itertools import chain

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.families.phases import order_of, pairs_of
from megatron_pp_ext.schedule.placement import v


def build(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV for any ranks >= 2 and microbatches >= 1.

    At unit cost and m >= 2p: makespan 6m + p - 1, peak 2p + 1 chunks.  With fewer microbatches
    than 2p, which DeepSeek's own code refuses, it is the order for 2p with the missing ones left out:
    no rank then waits for anything it did not wait for before.
    """
    placement = v(ranks)
    whole = max(microbatches, 2 * ranks)
    orders = (order_of(_phases(rank, ranks, whole), rank, placement) for rank in range(ranks))
    trimmed = tuple(tuple(action for action in order if action.microbatch < microbatches) for order in orders)
    return Schedule("dualpipe-v", placement, microbatches, trimmed)


def build_paired(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV with the pairs of phases 4 and 5, for the same sizes and with the same memory."""
    plain = build(ranks, microbatches)
    actions = set(plain)
    phases = (_phases(rank, ranks, max(microbatches, 2 * ranks)) for rank in range(ranks))
    pairs = (pairs_of(of_rank, rank, plain.placement) for rank, of_rank in enumerate(phases))
    paired = (forward for forward, backward in chain.from_iterable(pairs) if {forward, backward} <= actions)
    return replace(plain, paired=frozenset(paired))


def _phases(rank: int, ranks: int, microbatches: int) -> tuple[tuple[str, int], ...]:
    above, half, odd = ranks - rank - 1, (rank + 1) // 2, (rank + 1) % 2
    return (
        ("F0", 2 * above),
        ("F0 F1", rank + 1),
        ("I1 W F1", above),
        ("F0+B1 F1+B0", microbatches - 2 * ranks + rank + 1),
        ("B1 F1+B0", above),
        *(("B1 B0", half), ("B1 I0", odd), ("I1 I0", half)),
        ("W I0", above),
        ("W", rank + 1),
    )
