"""V-ZB: no bubble within a rank, at 1F1B's memory (arXiv 2405.15362, section 3, figure 4; as ZB-V
already arXiv 2401.10241, section 6).

Rank r, which holds chunk 0 and chunk 1, goes through eight phases.  Those named 0 belong to the
way down and back to rank 0, those named 1 to the leg that turns round at the last rank:

1. F0 until the first microbatch is back from the last rank:           2(p - r) - 1 times
2. F1 F0, as microbatches come back and memory allows it:              r
3. F1 I1 W1, memory is full, a chunk must go before one comes:         p - r
4. F0 I0 W0 F1 I1 W1, the steady state:                                m - 2p + 1 + r
5. I0 W0 F1 I1 W1, no F0 left:                                         p - 1 - r
6. I0 I1, gradients on the way to other ranks first:                   r
7. I0 W0:                                                              p - r
8. the remaining W0 W1:                                                r
"""

from megatron_pp_ext.schedule.actions import Action, Schedule
from megatron_pp_ext.schedule.families.building_block import Block, unroll
from megatron_pp_ext.schedule.families.phases import order_of
from megatron_pp_ext.schedule.placement import Placement, v


def build(ranks: int, microbatches: int) -> Schedule:
    """V-ZB for any ranks >= 2 and microbatches >= 1.

    At unit cost: makespan 6m + p - 1 for m >= p, span 6m for m >= 2p - 1, peak 2 * min(p, m)
    chunks.  With fewer microbatches than 2p - 1 there is no steady state to build the phases
    around; the schedule is then the paper's building block with steps 4 and 2, unrolled.
    """
    placement = v(ranks)
    if microbatches < 2 * ranks - 1:
        orders = unroll(Block((4, 2), (1, 1, 1)), ranks, microbatches, cap=2 * ranks, in_turn=True)
    else:
        orders = tuple(_order(rank, placement, microbatches) for rank in range(ranks))
    return Schedule("v-zb", placement, microbatches, orders)


def _order(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    ranks = placement.ranks
    phases = (
        ("F0", 2 * (ranks - rank) - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", ranks - rank),
        ("F0 I0 W0 F1 I1 W1", microbatches - 2 * ranks + 1 + rank),
        ("I0 W0 F1 I1 W1", ranks - 1 - rank),
        ("I0 I1", rank),
        ("I0 W0", ranks - rank),
        ("W0 W1", rank),
    )
    return order_of(phases, rank, placement)
