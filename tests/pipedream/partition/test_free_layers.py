"""Graphs with more down-sets than are searched, where layers that cost nothing are held early."""

import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.pipedream.partition import antichains
from megatron_pp_ext.pipedream.partition.cost_formulas import FORMULAS
from megatron_pp_ext.pipedream.partition.partitioner import partition
from megatron_pp_ext.pipedream.partition.recurrence import Level
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer
from tests.support.every_pipeline import Oracle

numbers = st.integers(0, 9).map(float)
some = st.sampled_from([0.0, 0.0, 0.0, 5.0])


@st.composite
def profiles(draw):
    """Graphs of at most three layers that compute and three that do not, with any edges that lead forward.

    Of the latter some have an output or keep something, and are not free.
    """
    kinds = draw(st.permutations([*draw(st.sampled_from(["c", "cc", "ccc"])), *"fff"]))
    found = [
        ProfiledLayer(f"layer {at}", draw(st.integers(1, 9)), *(draw(numbers) for _ in range(4)))
        if kind == "c"
        else ProfiledLayer(f"layer {at}", 0, 0, draw(some), draw(some), draw(some))
        for at, kind in enumerate(kinds)
    ]
    pairs = [(a.name, b.name) for at, a in enumerate(found) for b in found[at + 1 :]]
    return Profile.graph(found, [pair for pair in pairs if draw(st.booleans())])


def has_costs(layer: ProfiledLayer) -> bool:
    return layer.seconds + layer.activation_bytes + layer.parameter_bytes + layer.kept_bytes > 0


@settings(max_examples=60, deadline=None)
@given(
    profile=profiles(),
    workers=st.integers(1, 3),
    cost=st.sampled_from(sorted(FORMULAS)),
    memory=st.just(math.inf) | st.integers(10, 60).map(float),
)
def test_nothing_is_lost_but_stages_of_free_layers_alone(profile, workers, cost, memory):
    levels = [Level(workers, 2.0)]
    oracle = Oracle(profile, levels, cost)
    best = min(
        (
            seconds
            for seconds, stages in oracle.pipelines()
            if all(any(has_costs(profile.layers[at]) for at in layers) for layers, _ in stages)
            and max(oracle.bytes(stages)) <= memory
        ),
        default=math.inf,
    )
    inputs = [sum(1 << a for a, b in profile.edges if b == at) for at in range(len(profile.layers))]
    fewest = len(antichains._with_free_layers_early(profile, inputs))
    with mock.patch.object(antichains, "MOST_STATES", fewest):
        if math.isinf(best):
            with pytest.raises(ValueError, match="is infeasible"):
                partition(profile, levels, cost=cost, memory=memory)
        else:
            found = partition(profile, levels, cost=cost, memory=memory)
            assert found.bottleneck_seconds == pytest.approx(best)
            assert sorted(at for stage in found.stages for at in stage.layers) == [*range(len(inputs))]


def translation(has_states: bool) -> Profile:
    """A translation model in the shape of PipeDream's GNMT: two stacks of LSTMs with skips around them.

    Every LSTM of the decoder takes its initial state as an item of a tuple.  Both the tuple and its items
    cost nothing, and each item may wait in any state until it is read (``has_states``).
    """
    layers = [ProfiledLayer("words", 0.1, 0.4, 13, 132), ProfiledLayer("other words", 0.1, 0.4, 13, 132)]
    edges, before = [], "words"
    if has_states:
        layers.append(ProfiledLayer("states", 0, 0, 0, 0))
    for at in range(16):
        lstm, add = f"LSTM {at}", f"add {at}"
        layers += [ProfiledLayer(lstm, 7, 14 + at, 13, 33), ProfiledLayer(add, 0, 0, 13, 0)]
        edges += [(before, lstm), (lstm, add), (before, add)]
        if at == 8:
            edges.append(("other words", lstm))
        if at > 8:
            edges.append(("LSTM 8", lstm))
        if at >= 8 and has_states:
            layers.append(ProfiledLayer(f"state {at}", 0, 0, 0, 0))
            edges += [("states", f"state {at}"), (f"state {at}", lstm)]
        before = add
    return Profile.graph(layers, edges)


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("workers", [4, 8, 16])
def test_a_translation_model_is_cut_as_without_its_free_layers(workers, straight):
    whole, bare = translation(has_states=True), translation(has_states=False)
    found, expected = (
        partition(profile, [Level(workers, 5.0)], straight=straight) for profile in (whole, bare)
    )
    assert found.bottleneck_seconds == expected.bottleneck_seconds
    assert found.replicas == expected.replicas
    assert sorted(at for stage in found.stages for at in stage.layers) == [*range(len(whole.layers))]


def test_a_straight_pipeline_with_a_stage_of_free_layers_alone_is_refused_in_a_large_graph():
    whole = translation(has_states=True)
    with pytest.raises(ValueError, match="over 40 workers has stages of layers without any"):
        partition(whole, [Level(40, 5.0)], straight=True)
