"""The states are the down-sets of the graph, and carry what crosses their edge."""

import pytest

from megatron_pp_ext.partition import antichains
from megatron_pp_ext.partition.antichains import states_of
from megatron_pp_ext.partition.profile import Layer, Profile


def layer(name: str, size: float = 1) -> Layer:
    return Layer(name, 1, 2, size, 10 * size)


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
    left, right = (states.sets.index(0b00011), states.sets.index(sum(1 << at for at in (0, r1(profile)))))
    assert not states.before[left, right] and not states.before[right, left]
    assert states.before[0, 1:].all() and not states.before[:, 0].any()


def r1(profile: Profile) -> int:
    return next(at for at, one in enumerate(profile.layers) if one.name == "r1")


def test_too_many_states_are_refused(monkeypatch):
    monkeypatch.setattr(antichains, "MOST_STATES", 100)
    loose = Profile.graph([layer(f"{at}") for at in range(7)], [])
    with pytest.raises(ValueError, match=r"more than 100 ways.*merge layers"):
        states_of(loose)
