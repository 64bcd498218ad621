"""Which updates wait for all stages, beside functions of Megatron's that would."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core import stage_optimizer
from megatron_pp_ext.integration.trainer import stage_statistics
from megatron_pp_ext.schedule.families.pipedream import WeightVersion
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.updates import Updates


@pytest.mark.parametrize(
    ("updates", "waits"),
    [
        (None, True),
        (Updates(1, WeightVersion.LATEST, True, Replicas.straight(2)), True),
        (Updates(1, WeightVersion.LATEST, False, Replicas.straight(2)), False),
    ],
)
def test_a_stage_keeps_its_own_value(updates: Updates | None, waits: bool) -> None:
    across = stage_statistics.keep_within_stage(lambda value, group=None: f"{value} of all")

    def norm(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
        return grad_stats_parallel_group

    within = stage_optimizer.sum_within_stage(norm)
    requested.activate(requested.Pipeline(replace(named("pipedream", 2, 1), updates=updates)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_optimizer, "_part_of_stage", lambda group: f"this stage's of {group}")
        try:
            assert across("norm") == ("norm of all" if waits else "norm")
            assert within([], grad_stats_parallel_group="all") == ("all" if waits else "this stage's of all")
            assert within([], 2, "all") == ("all" if waits else "this stage's of all")
            # Without a group stock sums over all ranks.
            assert within([]) == (None if waits else "this stage's of None")
        finally:
            requested.activate(None)
