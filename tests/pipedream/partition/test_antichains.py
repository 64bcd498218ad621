"""The states are the down-sets of the graph, and carry what crosses their edge."""

from dataclasses import replace
from itertools import chain, pairwise

import pytest

from megatron_pp_ext.pipedream.partition import antichains
from megatron_pp_ext.pipedream.partition.antichains import groups_of, states_of
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer


def layer(name: str, size: float = 1) -> ProfiledLayer:
    return ProfiledLayer(name, 1, 2, size, 10 * size)


def test_a_chain_has_its_prefixes():
    states = states_of(Profile.chain(layer(name, size) for name, size in (("a", 1), ("b", 2), ("c", 4))))
    assert states.sets == (0b000, 0b001, 0b011, 0b111)
    assert states.seconds.tolist() == [0, 3, 6, 9]
    assert states.weights.tolist() == [0, 10, 30, 70]
    assert states.kept.tolist() == [0, 1, 3, 7]
    assert states.crossing.tolist() == [0, 1, 2, 0]
    assert states.layers(1, 3) == (1, 2)


def test_a_diamond_has_every_way_along_its_branches():
    edges = [("in", "l1"), ("l1", "l2"), ("l2", "out"), ("in", "r1"), ("r1", "out")]
    profile = Profile.graph(
        [layer(name, 2**at) for at, name in enumerate(("in", "l1", "l2", "r1", "out"))], edges
    )
    states = states_of(profile)
    names = {
        frozenset(profile.layers[at].name for at in states.layers(0, state)): float(states.crossing[state])
        for state in range(len(states))
    }
    assert names == {
        frozenset(): 0,
        frozenset({"in"}): 1,
        frozenset({"in", "l1"}): 1 + 2,
        frozenset({"in", "r1"}): 1 + 8,
        frozenset({"in", "l1", "l2"}): 1 + 4,
        frozenset({"in", "l1", "r1"}): 2 + 8,
        frozenset({"in", "l1", "l2", "r1"}): 4 + 8,
        frozenset({"in", "l1", "l2", "r1", "out"}): 0,
    }
    (r1,) = (at for at, one in enumerate(profile.layers) if one.name == "r1")
    left, right = states.sets.index(0b00011), states.sets.index(1 | 1 << r1)
    assert not states.before[left, right] and not states.before[right, left]
    assert states.before[0, 1:].all() and not states.before[:, 0].any()


def free(name: str) -> ProfiledLayer:
    return ProfiledLayer(name, 0, 0, 0, 0)


def test_of_too_many_states_those_remain_that_hold_free_layers_early(monkeypatch):
    """``shape`` and ``item`` are free: no state waits with them, though 6 of 11 down-sets do."""
    edges = [("shape", "item"), ("item", "b"), ("a", "b"), ("shape", "c"), ("b", "c")]
    profile = Profile.graph([layer("a"), free("shape"), free("item"), layer("b", 4), layer("c")], edges)
    monkeypatch.setattr(antichains, "MOST_STATES", 4)
    states = states_of(profile)
    names = [{profile.layers[at].name for at in states.layers(0, state)} for state in range(len(states))]
    assert names == [
        set(),
        {"a", "shape", "item"},
        {"a", "shape", "item", "b"},
        {"a", "shape", "item", "b", "c"},
    ]
    assert states.crossing.tolist() == [0, 1, 4, 0]
    assert states.before.tolist() == [[a < b for b in range(4)] for a in range(4)]


@pytest.mark.parametrize("cost", ["backward_seconds", "activation_bytes", "parameter_bytes", "saved_bytes"])
def test_a_layer_with_any_cost_is_not_free(cost, monkeypatch):
    monkeypatch.setattr(antichains, "MOST_STATES", 4)
    layers = [layer("a"), replace(free("b"), **{"saved_bytes": 0, cost: 5}), layer("c"), free("shape")]
    states = states_of(Profile.graph(layers, [("a", "b"), ("b", "c"), ("shape", "c")]))
    assert [state.bit_count() for state in states.sets] == [0, 2, 3, 4]


BRANCHES = {
    "in a row": (
        [("in", "a"), ("a", "b"), ("b", "c"), ("c", "out"), ("in", "d"), ("d", "e"), ("e", "out")],
        "merge layers that follow each other without a branch into one: a to c, d to e",
    ),
    "one by one": (
        [("a", "ab"), ("b", "ab"), ("ab", "out"), ("c", "out"), *(("in", to) for to in ("a", "b", "c"))],
        "merge layers with those that only they read into one: a to out",
    ),
    "read by all": ([(a, b) for a in "abc" for b in "def"], "merge layers of its branches into one"),
}


@pytest.mark.parametrize("kind", BRANCHES)
def test_too_many_states_are_refused_with_what_to_merge(kind, monkeypatch):
    monkeypatch.setattr(antichains, "MOST_STATES", 6)
    edges, message = BRANCHES[kind]
    profile = Profile.graph([layer(name) for name in dict.fromkeys(sum(edges, ()))], edges)
    with pytest.raises(ValueError, match=rf"can be cut in more than 6 ways, the most .*: {message}$"):
        states_of(profile)


@pytest.mark.parametrize("within_branch", [True, False])
def test_what_is_merged_leaves_no_cycle_and_fewer_states(within_branch):
    """Two modules with branches of 3 and 2 layers: 13 down-sets each; merged, 5 or 2."""
    edges = []
    for at in range(2):
        for branch, length in (("l", 3), ("r", 2)):
            names = [f"{at}{branch}{number}" for number in range(length)]
            edges += pairwise([f"in{at}", *names, f"in{at + 1}"])
    profile = Profile.graph([layer(name) for name in dict.fromkeys(sum(edges, ()))], edges)
    inputs = [sum(1 << a for a, b in profile.edges if b == at) for at in range(len(profile.layers))]
    groups = groups_of(dict(enumerate(inputs)), within_branch)
    assert sorted(chain.from_iterable(groups)) == list(range(len(profile.layers)))
    name_of = {at: profile.layers[group[-1]].name for group in groups for at in group}
    merged = Profile.graph(
        [layer(name) for name in dict.fromkeys(name_of.values())],
        {(name_of[a], name_of[b]) for a, b in profile.edges if name_of[a] != name_of[b]},
    )
    assert (len(states_of(profile)), len(states_of(merged))) == (26, 10 if within_branch else 4)
