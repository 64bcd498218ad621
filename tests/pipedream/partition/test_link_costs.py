"""``--cost links`` against a simulation of full-duplex links, which knows no formula."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.chains import random_chain
from megatron_pp_ext.pipedream.partition.cost_formulas import FORMULAS
from megatron_pp_ext.pipedream.partition.partitioner import Partition, partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer, read_graph_txt
from reference import vgg16
from tests.support import rounding
from tests.support.link_judge import StageWork, makespan, seconds_of_a_microbatch, stages_of

MODELS = {"VGG-16": read_graph_txt(vgg16.graph_txt())} | {f"random {at}": random_chain(at) for at in range(2)}

DEEP = 16
"""With so many times as many microbatches in flight as PipeDream keeps, queues do not run empty."""

OFF = 1.01
"""How many times the formula's seconds the judge may then take.

Queues that serve in order have no bound that is known; benchmarks/results/partition_costs.md finds 1.003
at most in 120 cases.
"""

BANDWIDTH = 2.0

works = st.builds(
    StageWork,
    forward=st.integers(1, 5).map(float),
    backward=st.integers(0, 9).map(float),
    weights=st.integers(0, 20).map(float),
    bytes_in=st.integers(0, 9).map(float),
    replicas=st.integers(1, 3),
    depth=st.integers(1, 6),
)


def busiest(stages: list[StageWork], bandwidth: float) -> float:
    """Seconds of a microbatch on the worker, or the direction of a link, that has most to do."""
    outputs = [stage.bytes_in for stage in stages[1:]] + [0.0]
    worst = 0.0
    for number, (stage, output) in enumerate(zip(stages, outputs, strict=True)):
        sent = output + (stage.bytes_in if number > 0 else 0)
        sent += 2 * (stage.replicas - 1) / stage.replicas * stage.weights
        worst = max(
            worst, (stage.forward + stage.backward) / stage.replicas, sent / bandwidth / stage.replicas
        )
    return worst


@settings(max_examples=100)
@given(stages=st.lists(works, min_size=1, max_size=4), times=st.integers(1, 3))
def test_no_pipeline_is_faster_than_its_busiest_worker_or_link(stages, times):
    """Whatever the order, so the formula is a lower bound, at any depth in flight."""
    count = times * math.lcm(*(stage.replicas for stage in stages))
    rounded = rounding.relative(eps=rounding.FLOAT64, terms=100 * count)
    assert makespan(stages, BANDWIDTH, count) >= count * busiest(stages, BANDWIDTH) * (1 - rounded)


def stage(forward=1.0, backward=2.0, weights=0.0, bytes_in=0.0, replicas=1, depth=1) -> StageWork:
    return StageWork(forward, backward, weights, bytes_in, replicas, depth)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seconds"),
    [
        ([stage()], 5, 15),
        ([stage(replicas=2)], 6, 9),
        # 8 bytes in 2 (4-1) / 4 of a direction: 6 s at 2 bytes a second, after 3 s of computation.
        ([stage(weights=8, replicas=4)], 4, 3 + 6),
        # The second all-reduce is asked for before the first has ended.
        ([stage(weights=8, replicas=4)], 8, 3 + 6 + 6),
        # Forward, to the switch and from it, forward, backward, back, backward.
        ([stage(), stage(bytes_in=4)], 1, 1 + 2 + 2 + 1 + 2 + 2 + 2 + 2),
        # One microbatch in flight: nothing overlaps.
        ([stage(), stage(bytes_in=4)], 3, 3 * 14),
        # Two: the second is behind the first by a forward or a backward, whatever the stage is.
        ([stage(depth=2), stage()], 2, 1 + 3 + 3 + 2),
    ],
)
def test_the_judge_plays_by_its_rules(stages, microbatches, seconds):
    assert makespan(stages, BANDWIDTH, microbatches) == pytest.approx(seconds)


@pytest.mark.parametrize("bandwidth", [1e9, 1.25e10])
@pytest.mark.parametrize("workers", [8])
@pytest.mark.parametrize("model", MODELS)
def test_the_judge_reaches_the_promise_and_prefers_links(model, workers, bandwidth):
    """By the lower bound no cut is faster than the best formula; the judge comes within ``OFF`` of it."""
    profile = MODELS[model]
    cuts = {cost: partition(profile, [Level(workers, bandwidth)], cost=cost) for cost in FORMULAS}

    def judged(cut: Partition) -> float:
        return seconds_of_a_microbatch(stages_of(cut, profile, DEEP), bandwidth)

    promised = cuts["links"].bottleneck_seconds
    assert promised == pytest.approx(busiest(stages_of(cuts["links"], profile), bandwidth))
    assert all(promised <= busiest(stages_of(cut, profile), bandwidth) * (1 + 1e-9) for cut in cuts.values())
    assert promised / OFF <= judged(cuts["links"]) <= promised * OFF
    assert all(judged(cuts["links"]) <= judged(cut) * OFF for cut in cuts.values())


def test_cuts_and_all_reduce_share_a_link():
    """3-1 sends 8 + 2 * 2/3 * 18 = 32 bytes over each link of its first stage."""
    model = Profile.chain([ProfiledLayer("a", 6, 0, 8, 18), ProfiledLayer("b", 2, 0, 1, 90)])
    found = partition(model, [Level(4, 2.0)], cost="links")
    assert (found.replicas, found.bottleneck_seconds) == ((3, 1), pytest.approx(32 / 2 / 3))


@pytest.mark.parametrize(("inside", "between", "seconds"), [(4.0, 2.0, 4), (1.0, 2.0, 6), (4.0, 1.2, 5)])
def test_a_cut_between_machines_loads_the_links_of_both_levels(inside, between, seconds):
    model = Profile.chain([ProfiledLayer("a", 4, 0, 6, 100), ProfiledLayer("b", 4, 0, 1, 100)])
    found = partition(model, [Level(1, inside), Level(2, between)], cost="links")
    assert (found.replicas, found.bottleneck_seconds) == ((1, 1), pytest.approx(seconds))
