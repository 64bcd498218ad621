"""Which updates wait for all stages, beside functions of Megatron's that would."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import optimizer
from megatron_pp_ext.megatron.trainer import reports
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates, WeightVersion


@pytest.mark.parametrize(
    ("updates", "waits"),
    [
        (None, True),
        (Updates(1, WeightVersion.LATEST, True, Replicas.straight(2)), True),
        (Updates(1, WeightVersion.LATEST, False, Replicas.straight(2)), False),
    ],
)
def test_a_stage_keeps_its_own_value(updates: Updates | None, waits: bool) -> None:
    across = reports.keep_within_stage(lambda value, group=None: f"{value} of all")

    def norm(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
        return grad_stats_parallel_group

    within = optimizer.sum_within_stage(norm)
    requested.activate(requested.Pipeline(replace(named("pipedream", 2, 1), updates=updates)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_part_of_stage", lambda group: f"this stage's of {group}")
        try:
            assert across("norm") == ("norm of all" if waits else "norm")
            assert within([], grad_stats_parallel_group="all") == ("all" if waits else "this stage's of all")
            assert within([], 2, "all") == ("all" if waits else "this stage's of all")
            # Without a group stock sums over all ranks.
            assert within([]) == (None if waits else "this stage's of None")
        finally:
            requested.activate(None)
