"""The cuts of a candidate's layers share what they count of a rank, where its stages are the same."""

from random import Random

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.planner.search.candidate_cuts import CandidateCuts, short_memory
from megatron_pp_ext.planner.search.workloads import Workloads
from megatron_pp_ext.planner.step.model_description import describe
from tests.planner.test_lower_bounds import CASES, candidate_of, random_cut

MARGIN = 0.05


@pytest.mark.parametrize(("model", "recompute", "name", "shares"), CASES)
def test_the_memory_of_cuts_in_turn_is_that_of_each_alone(model, recompute, name, shares):
    candidate, random = candidate_of(model, recompute, name, shares), Random(name)
    workloads = Workloads(describe(model | {"micro_batch_size": 1}), system.read("h100"))
    stages = workloads.stages(candidate, candidate.placement)
    cuts = CandidateCuts(candidate, stages, workloads, MARGIN, 80e9)
    tried = [cut for _ in range(6) if stages.can_be(cut := random_cut(random, stages.items, stages.least))]
    assert len(set(tried)) > 1
    for cut in tried:
        assert cuts.memory(cut) == short_memory(candidate, cuts.work(cut), MARGIN)
