"""The partitioner against the public optimizer's published answers and against trying every pipeline."""

import math
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.pipedream.partition.cost_formulas import FORMULAS, StageLoad, reference
from megatron_pp_ext.pipedream.partition.partitioner import MOST_STATE, Partition, partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import (
    LEAST_SECONDS,
    MOST,
    Profile,
    ProfiledLayer,
    read_graph_txt,
)
from reference import vgg16
from tests.support import rounding
from tests.support.every_pipeline import Oracle

VGG16 = read_graph_txt(vgg16.graph_txt())

numbers = st.integers(0, 9).map(float)
layers = st.builds(
    ProfiledLayer,
    name=st.just(""),
    forward_seconds=st.integers(1, 9).map(float),
    backward_seconds=numbers,
    activation_bytes=numbers,
    parameter_bytes=numbers,
    saved_bytes=st.none() | numbers,
)
some_levels = st.lists(
    st.builds(Level, workers=st.integers(1, 3), bandwidth=st.sampled_from([1.0, 2.0, 8.0])),
    min_size=1,
    max_size=2,
)
ROUNDED = rounding.relative(eps=rounding.FLOAT64)
"""The public optimizer prints all digits of its floats."""

costs = st.sampled_from(sorted(FORMULAS))


@st.composite
def profiles(draw, most, is_graph):
    """Chains, or graphs with any edges that lead forward."""
    found = [
        ProfiledLayer(f"layer {at}", *(getattr(one, name) for name in ProfiledLayer.__slots__[1:]))
        for at, one in enumerate(draw(st.lists(layers, min_size=1, max_size=most)))
    ]
    if not is_graph:
        return Profile.chain(found)
    pairs = [(a.name, b.name) for at, a in enumerate(found) for b in found[at + 1 :]]
    return Profile.graph(found, [pair for pair in pairs if draw(st.booleans())])


def assert_consistent(found: Partition, profile: Profile, workers: int) -> None:
    """The stages hold every layer once, feed only forward, and use every worker."""
    placed = [at for stage in found.stages for at in stage.layers]
    assert sorted(placed) == list(range(len(profile.layers)))
    stage_of = {at: number for number, stage in enumerate(found.stages) for at in stage.layers}
    assert all(stage_of[a] <= stage_of[b] for a, b in profile.edges)
    assert sum(found.replicas) == workers


@pytest.mark.parametrize(
    ("workers", "bandwidth", "straight", "seconds", "data_parallel", "replicas"), vgg16.RUNS
)
def test_vgg16_as_the_public_optimizer_has_it(workers, bandwidth, straight, seconds, data_parallel, replicas):
    found = partition(VGG16, [Level(workers, bandwidth)], cost="reference", straight=straight)
    assert found.bottleneck_seconds == pytest.approx(seconds, rel=ROUNDED, abs=0)
    assert found.data_parallel_seconds == pytest.approx(data_parallel, rel=ROUNDED, abs=0)
    assert found.single_worker_seconds == pytest.approx(0.672535, rel=ROUNDED, abs=0)
    assert "-".join(map(str, found.replicas)) == replicas
    assert_consistent(found, VGG16, workers)


@pytest.mark.parametrize(
    ("levels", "straight", "seconds"),
    [
        ([Level(2, 25e9), Level(2, 3.1e9)], False, 0.19057312560000003),
        ([Level(2, 25e9), Level(2, 3.1e9)], True, 0.21645),
        ([Level(4, 25e9), Level(2, 3.1e9)], False, 0.12876775856000003),
        ([Level(2, 1e9), Level(4, 1e9)], False, 0.12744082133333334),
        ([Level(2, 25e9), Level(2, 3.1e9), Level(2, 1e9)], False, 0.16106679789419356),
    ],
)
def test_hierarchies_as_the_public_optimizer_has_them(levels, straight, seconds):
    found = partition(VGG16, levels, cost="reference", straight=straight)
    assert found.bottleneck_seconds == pytest.approx(seconds, rel=ROUNDED, abs=0)


@settings(max_examples=60)
@given(profile=profiles(5, is_graph=False), workers=st.integers(1, 4), cost=costs, straight=st.booleans())
def test_chains_are_cut_best(profile, workers, cost, straight):
    workers = min(workers, len(profile.layers)) if straight else workers
    levels = [Level(workers, 2.0)]
    found = partition(profile, levels, cost=cost, straight=straight)
    assert found.bottleneck_seconds == pytest.approx(Oracle(profile, levels, cost, straight).best())
    assert_consistent(found, profile, workers)


@settings(max_examples=60)
@given(profile=profiles(5, is_graph=True), workers=st.integers(1, 3), cost=costs)
def test_graphs_are_cut_best(profile, workers, cost):
    levels = [Level(workers, 2.0)]
    found = partition(profile, levels, cost=cost)
    assert found.bottleneck_seconds == pytest.approx(Oracle(profile, levels, cost).best())
    assert_consistent(found, profile, workers)


@settings(max_examples=40)
@given(
    profile=profiles(4, is_graph=True),
    levels=some_levels,
    cost=costs,
    share=st.floats(0.5, 2),
    state=st.sampled_from([0.0, 3.0]),
)
def test_hierarchies_and_memory(profile, levels, cost, share, state):
    """Nested machines, with a limit around the least that anything needs, optimizer state included."""
    oracle = Oracle(profile, levels, cost, state=state)
    best = partial(partition, profile, levels, cost=cost, state_per_weight=state)
    least = oracle.least_memory()
    workers = math.prod(level.workers for level in levels)
    assert partition(profile, levels, cost=cost).bottleneck_seconds == pytest.approx(oracle.best())
    memory = share * least
    if memory < least:
        with pytest.raises(ValueError, match=f"raise it to at least {math.ceil(least)}$"):
            best(memory=max(memory, 1e-3))
    elif memory > 0:
        found = best(memory=memory)
        assert found.bottleneck_seconds == pytest.approx(oracle.best(memory))
        assert_consistent(found, profile, workers)
        stages = [(frozenset(stage.layers), stage.replicas) for stage in found.stages]
        assert [stage.memory_bytes for stage in found.stages] == pytest.approx(oracle.bytes(stages))
        assert max(oracle.bytes(stages)) <= memory


def test_stages_reach_the_bottleneck_they_promise():
    """A residual block: the skip's output crosses every cut between its ends."""
    block = [
        ProfiledLayer("in", 1, 1, 8, 0),
        ProfiledLayer("a", 2, 2, 1, 0),
        ProfiledLayer("b", 2, 2, 1, 0),
        ProfiledLayer("add", 1, 1, 8, 0),
    ]
    names = [("in", "a"), ("a", "b"), ("b", "add"), ("in", "add")]
    chain, skip = Profile.chain(block), Profile.graph(block, names)
    cut = partial(partition, cost="paper", straight=True)
    levels = [Level(2, 4.0)]
    assert cut(chain, levels).bottleneck_seconds == 6  # in a | b add
    assert cut(skip, levels).bottleneck_seconds == 6
    slow = [Level(2, 2.0)]
    assert cut(chain, slow).bottleneck_seconds == 6
    assert cut(skip, slow).bottleneck_seconds == 9  # the cut carries 8 + 1 bytes


def test_the_paper_charges_a_cut_on_its_own_level():
    """The cut between machines loads their link, and not the slower ones of the workers inside."""
    model = Profile.chain([ProfiledLayer("a", 4, 0, 6, 100), ProfiledLayer("b", 4, 0, 1, 100)])
    found = partition(model, [Level(1, 1.0), Level(2, 2.0)], cost="paper")
    assert (found.replicas, found.bottleneck_seconds) == ((1, 1), 2 * 6 / 2)


def test_workers_of_a_machine_share_gradients_in_the_first_stage_only():
    """Two machines, each of three workers, send 4 (2-1) / 2 of 6 bytes at one byte a second."""
    first = StageLoad(
        seconds=5, weights=6, bytes_in=0, bytes_out=0, replicas=2, bandwidth=1, machines=3, is_first=True
    )
    assert reference(first) == (5 + 12 / 3) / 2
    assert reference(first._replace(is_first=False)) == (5 + 12) / 2


def test_the_public_optimizer_charges_both_sides_of_a_stage():
    """1-1-2 would take 8 s but for the output of its middle stage, which has one replica to send it."""
    model = Profile.chain(
        [ProfiledLayer("a", 8, 0, 1, 9), ProfiledLayer("b", 7, 0, 8, 9), ProfiledLayer("c", 1, 0, 3, 0)]
    )
    found = partition(model, [Level(4, 1.0)], cost="reference")
    assert (found.bottleneck_seconds, found.replicas) == (pytest.approx(32 / 3), (3, 1))


def test_noam_and_versions():
    """Without replicas, n - s versions on stage s; NOAM is those of the input stage."""
    profile = Profile.chain(ProfiledLayer(f"{at}", 1, 1, 1, 10) for at in range(4))
    found = partition(profile, [Level(4, 1e9)], straight=True)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.memory_bytes for stage in found.stages] == [44, 33, 22, 11]
    assert found.noam == 4
    replicated = partition(VGG16, [Level(16, 1e9)], cost="reference")
    assert replicated.replicas == (13, 2, 1)
    assert [stage.in_flight for stage in replicated.stages] == [2, 2, 1]


def test_a_limit_moves_the_cut():
    """Two versions of the heavy first layer and of its neighbour do not fit, of it alone they do."""
    profile = Profile.chain(
        ProfiledLayer(f"{at}", 1, 1, 1, weights) for at, weights in enumerate((10, 1, 1, 1))
    )

    def cut(memory):
        found = partition(profile, [Level(2, 1e9)], memory=memory, straight=True)
        return [stage.layers for stage in found.stages], found.bottleneck_seconds

    assert cut(26) == ([(0, 1), (2, 3)], 4)
    assert cut(25) == ([(0,), (1, 2, 3)], 6)
    with pytest.raises(ValueError, match=r"raise it to at least 22$"):
        cut(21)


@pytest.mark.wide
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cost", sorted(FORMULAS))
def test_the_largest_and_smallest_numbers_can_be_counted_with(cost):
    """An overflow or a division by 0 would warn, and end in a cut that is not the best."""
    largest = ProfiledLayer("largest", MOST, MOST, MOST, MOST)
    heavy = Profile.chain(replace(largest, name=f"{at}") for at in range(4))
    light = Profile.chain([ProfiledLayer("a", LEAST_SECONDS, 0, MOST, MOST), ProfiledLayer("b", 0, 0, 0, 0)])
    for profile in (heavy, light):
        for levels in ([Level(2, 1.0), Level(3, 1.0)], [Level(4096, sys.float_info.max)]):
            found = partition(profile, levels, cost=cost, state_per_weight=MOST_STATE)
            numbers = [found.bottleneck_seconds, found.data_parallel_seconds, found.speedup]
            numbers += [stage.memory_bytes for stage in found.stages]
            assert all(0 < number < math.inf for number in numbers)


BANDWIDTHS = [(0, "0"), (-1, "-1"), (1e-320, "9.99989e-321"), (math.nan, "nan"), (math.inf, "inf")]


@pytest.mark.parametrize(
    ("levels", "options", "message"),
    [
        ([Level(0, 1e9)], {}, "the number of workers is 0, but must be 1 or more"),
        ([Level(5000, 1e9)], {}, "5000, but at most 4096 of one level can be searched"),
        *(
            (
                [Level(2, 1e9), Level(2, value)],
                {},
                f"the bandwidth is {shown}, but must be a finite number of 1",
            )
            for value, shown in BANDWIDTHS
        ),
        ([Level(1000, 1e9)] * 4, {}, r"all levels together have 1e[+]12 workers, but at most 1e[+]09 can be"),
        ([Level(41, 1e9)], {"straight": True}, "41 workers needs as many layers, but the profile has 40"),
        ([Level(2, 1e9)], {"memory": 0.0}, "the memory is 0, but must be a number of bytes above 0"),
        ([Level(2, 1e9)], {"memory": math.nan}, "the memory is nan"),
        ([Level(2, 1e9)], {"memory": 1e9}, "a memory of 1e[+]09 bytes is infeasible"),
        ([Level(2, 1e9)], {"state_per_weight": -1.0}, "the state per weight is -1, but must be a number fr"),
        ([Level(2, 1e9)], {"state_per_weight": 1e308}, r"the state per weight is 1e[+]308"),
        ([Level(2, 1e9)], {"state_per_weight": math.nan}, "the state per weight is nan"),
        ([Level(2, 1e9)], {"cost": "mine"}, "'mine' is unknown: choose one of links, paper, reference"),
        ([], {}, "no machines"),
    ],
)
def test_refusals(levels, options, message):
    with pytest.raises(ValueError, match=message):
        partition(VGG16, levels, **options)
