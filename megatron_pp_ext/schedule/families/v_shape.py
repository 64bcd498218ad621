"""V-Min and V-Half: a third and a half of 1F1B's memory (arXiv 2405.15362, section 3, figures 3 and 4).

A rank's memory is the sum of its two chunks' lifespans, and the V placement makes that sum the
same on every rank: one chunk lives long where the other lives short.  How large it is depends on
the steps of the building block, the ticks from rank to rank on the way down and on the way up:
1 and 1 for V-Min, 2 and 1 for V-Half; 6 ticks in all would be 1F1B's memory.

The turns ensure that no two of a rank's actions fall on the same tick of the period; where
(1, 1, 1) does not, the paper waits at rank 0.  V-Half follows it, and keeps its order in the steady
state: it has no repeating bubble as long as W + 2I >= 2F and W + 2F >= 2I.

V-Min has one at unequal times even in the block's order, so nothing is lost by letting its legs
overtake each other all the time.  ``unroll`` never waits for a tick of the block, so a longer turn
then costs nothing: it lets a rank take more microbatches between its two forwards and makes what
comes after the turn less urgent.  The turns of V-Min were found by trying all up to (6, 6, 6) for 2
to 12 ranks at unit cost, and are the shortest.
"""

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.families.building_block import Block, unroll
from megatron_pp_ext.schedule.placement import v


def build_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min for any ranks >= 2 and microbatches >= 1.

    At unit cost the peak is 2 * floor((p + 4) / 3) chunks and, for m >= 2p, the makespan 6m + 4p
    less 5, 7 or 9 for a p of 3k + 1, 3k or 3k + 2 (at p = 2 it is 6m + 1).  In the
    last case the paper's block gives 5.
    """
    turns = ((3, 1, 1), (1, 1, 1), (5, 4, 1))[ranks % 3]
    cap = 2 * ((ranks + 4) // 3)
    orders = unroll(Block((1, 1), turns), ranks, microbatches, cap)
    return Schedule("v-min", v(ranks), microbatches, orders)


def build_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half for any ranks >= 2 and microbatches >= 1.

    At unit cost the peak is 2 * floor((p + 2) / 2) chunks and, for m >= 2p, the makespan 6m + 3p
    less 4 for an odd p and less 7 for an even one (at p = 2 it is 6m + 1, as for V-ZB).
    """
    is_even = ranks % 2 == 0
    wait = 3 if is_even and ranks > 2 else 0
    cap = 2 * ((ranks + 2) // 2)
    block = Block((2, 1), (1, 1 + wait, 1))
    orders = unroll(block, ranks, microbatches, cap, ahead=int(is_even), in_turn=True)
    return Schedule("v-half", v(ranks), microbatches, orders)
