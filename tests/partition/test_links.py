"""The cost ``links`` against a judge that plays the pipeline over links that send and receive at once."""

from itertools import pairwise

import pytest

from benchmarks.planner.cuts import cases, chain
from benchmarks.planner.links_judge import seconds, stages_of
from megatron_pp_ext.partition.cost_formulas import FORMULAS, StageLoad
from megatron_pp_ext.partition.partitioner import partition
from megatron_pp_ext.partition.profile import Layer, Profile
from megatron_pp_ext.partition.recurrence import Level
from tests.support import rounding

ROUNDED = rounding.relative(eps=rounding.FLOAT64)
SOME = [case for number, case in enumerate(cases()) if number % 4 == 0]


def names(case):
    name, _, workers, bandwidth = case
    return f"{name}-{workers}-{bandwidth:g}"


@pytest.mark.parametrize("case", SOME, ids=names)
@pytest.mark.parametrize("cost", FORMULAS)
def test_no_pipeline_is_faster_than_links_say(case, cost):
    """Whole rounds of every stage keep the busiest worker or link busy for as long as the formula says."""
    _, profile, workers, bandwidth = case
    stages = stages_of(profile, partition(profile, [Level(workers, bandwidth)], cost=cost))
    sent = [0.0, *(stage.sent for stage in stages)]
    each = max(
        FORMULAS["links"](
            StageLoad(
                stage.forward + stage.backward, stage.weights, *cuts, stage.replicas, bandwidth, 1, False
            )
        )
        for stage, cuts in zip(stages, pairwise(sent), strict=True)
    )
    count = 240
    rounds = min(count // stage.replicas * stage.replicas for stage in stages)
    assert seconds(stages, bandwidth, count) >= rounds * each * (1 - count * ROUNDED)


@pytest.mark.parametrize("case", SOME, ids=names)
def test_cuts_by_links_are_seldom_worse(case):
    """Where messages take most of the time, their queues cost up to a fifth, which no formula counts."""
    _, profile, workers, bandwidth = case
    count = 960
    took = {
        cost: seconds(stages_of(profile, found), bandwidth, count)
        for cost in FORMULAS
        for found in [partition(profile, [Level(workers, bandwidth)], cost=cost)]
    }
    bottleneck = partition(profile, [Level(workers, bandwidth)], cost="links").bottleneck_seconds
    assert took["links"] <= 1.25 * count * bottleneck
    assert took["links"] <= 1.05 * min(took.values())


def test_two_workers_by_hand():
    """The stages take 2 and 3 s, and 4 bytes cross each way at 1 a second; replicas have 5 bytes to send."""
    profile = Profile.chain([Layer("a", 1.0, 1.0, 4.0, 1.0), Layer("b", 1.0, 2.0, 0.0, 4.0)])
    found = partition(profile, [Level(2, 1.0)], cost="links")
    assert found.replicas == (2,)
    assert found.bottleneck_seconds == found.data_parallel_seconds == 2.5
    straight = partition(profile, [Level(2, 1.0)], cost="links", straight=True)
    assert straight.bottleneck_seconds == 4.0


def test_memory_is_kept_by_links_too():
    profile = chain(0)
    levels = [Level(8, 1e8)]
    free = max(stage.memory_bytes for stage in partition(profile, levels, cost="links").stages)
    found = partition(profile, levels, cost="links", memory=0.9 * free)
    assert max(stage.memory_bytes for stage in found.stages) <= 0.9 * free
