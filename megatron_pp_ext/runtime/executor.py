"""The loop over one rank's operations.

It knows none of them: a new kind of work is a new operation (``operations``) and its place in a plan.
"""

from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.rank import Rank


def execute(plan: RankPlan, rank: Rank) -> None:
    """Run one training step of ``rank``.

    On return all operations have run, the gradients are in the parameters and, where the plan flushes, all
    messages have left.
    """
    for operation in plan.operations:
        operation.run(rank)
