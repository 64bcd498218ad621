"""The places where a graph of layers may be cut, and what to merge where it has too many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from megatron_pp_ext.schedule.formats.profile import Profile

_MOST_NAMED = 4


def what_to_merge(inputs: Mapping[int, int], names: Sequence[str]) -> str:
    """Return which layers to merge, by their ``names``, as the fix of an error.

    ``inputs`` has the layers that each layer reads, as bits, in an order in which every layer is after them.
    Layers that follow each other without a branch come first, since their stages stay closest to the best;
    where there are none, layers with all those that they alone read.
    """
    for merged, within_branch in (
        ("layers that follow each other without a branch", True),
        ("layers with those that only they read", False),
    ):
        groups = sorted((group for group in groups_of(inputs, within_branch) if len(group) > 1), key=len)[
            ::-1
        ]
        if groups:
            spans = ", ".join(f"{names[group[0]]} to {names[group[-1]]}" for group in groups[:_MOST_NAMED])
            more = f", and {len(groups) - _MOST_NAMED} more" if len(groups) > _MOST_NAMED else ""
            return f"merge {merged} into one: {spans}{more}"
    return "merge layers of its branches into one"


def groups_of(inputs: Mapping[int, int], within_branch: bool) -> list[list[int]]:
    """Return all layers in groups, in which each but the last is read by one other of its group alone.

    ``within_branch`` are groups in which, beyond this, each but the first reads no other than the one before.
    A group can become one layer, since only its last has readers outside.
    """
    readers: dict[int, list[int]] = {layer: [] for layer in inputs}
    for layer, reads in inputs.items():
        for at in range(reads.bit_length()):
            if reads >> at & 1:
                readers[at].append(layer)
    group_of: dict[int, list[int]] = {}
    for layer in reversed(list(inputs)):
        joins = len(readers[layer]) == 1 and not (within_branch and inputs[readers[layer][0]] != 1 << layer)
        group_of[layer] = group_of[readers[layer][0]] if joins else []
        group_of[layer].insert(0, layer)
    return list({id(group): group for group in group_of.values()}.values())


MOST_STATES = 4_000
"""With more states, tables of states x states do not fit in memory, and a search takes too long."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class States:
    """Down-sets of a profile by rising size; the first is empty, the last is the whole model.

    ``sets[s]`` has bit i where state s holds layer i.  The other fields have one entry for each state:
    seconds of one microbatch, bytes of weights, bytes that a microbatch in flight keeps, and bytes of the
    outputs that layers outside read.  ``before[a, b]`` is true where a is a proper subset of b.

    Stages 0..s of a pipeline together hold a set of layers that reads nothing from outside: a down-set of the
    graph, whose latest layers form an antichain.  A chain of N layers has N+1 of them, its prefixes; a graph
    with parallel branches has one for every combination of prefixes of its branches.  The dynamic programme
    goes from one such state to any larger one; the layers in between are a stage.
    """

    sets: tuple[int, ...]
    seconds: Array
    weights: Array
    kept: Array
    crossing: Array
    before: Array

    def __len__(self) -> int:
        return len(self.sets)

    def layers(self, start: int, end: int) -> tuple[int, ...]:
        """Return the positions of the layers that are in ``end`` and not in ``start``."""
        inside = self.sets[end] & ~self.sets[start]
        return tuple(at for at in range(inside.bit_length()) if inside >> at & 1)


def states_of(profile: Profile) -> States:
    """Return the states of ``profile``; ValueError if there are more than ``MOST_STATES``.

    Where there are more down-sets, only those are states that hold every free layer as soon as they can.

    PipeDream's public optimizer has the same states, but in a graph it also charges outputs that no layer
    outside reads any more.  On its ResNet, GNMT, SqueezeNet and AlexNet profiles one of the answers compared
    differs for this reason: ResNet-50 straight over 4 workers at 1.25e9 bytes a second, 0.2581 s there and
    0.2498 s here.
    """
    layers = profile.layers
    inputs = [0] * len(layers)
    for a, b in profile.edges:
        inputs[b] |= 1 << a
    sets = _down_sets(dict(enumerate(inputs))) or _with_free_layers_early(profile, inputs)
    holds = np.array([[state >> at & 1 for at in range(len(layers))] for state in sets], dtype=float)
    reads = np.array([[state >> at & 1 for at in range(len(layers))] for state in inputs], dtype=float)
    # 0/1 matrices: an entry of a product counts what two sets share.
    is_read_outside = (1 - holds) @ reads > 0
    return States(
        sets=sets,
        seconds=holds @ [layer.seconds for layer in layers],
        weights=holds @ [layer.parameter_bytes for layer in layers],
        kept=holds @ [layer.kept_bytes for layer in layers],
        crossing=(holds * is_read_outside) @ [layer.activation_bytes for layer in layers],
        before=(holds @ (1 - holds).T == 0) & ~np.eye(len(sets), dtype=bool),
    )


def _down_sets(inputs: Mapping[int, int]) -> tuple[int, ...] | None:
    """Return all sets of layers that hold the ``inputs`` of each of their layers, by rising size.

    None if there are more than ``MOST_STATES``.
    """
    sets = level = [0]
    while level:
        level = sorted(
            {
                state | 1 << layer
                for state in level
                for layer, needs in inputs.items()
                if not state >> layer & 1 and not needs & ~state
            }
        )
        sets = sets + level
        if len(sets) > MOST_STATES:
            return None
    return tuple(sets)


def _with_free_layers_early(profile: Profile, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return the down-sets, by rising size, that hold every free layer whose inputs they hold.

    A free layer takes no time and no memory, and its output has no bytes.  To add it to a state that has its
    inputs makes no stage and no cut dearer, and what was a subset of another state remains one.  So for every
    pipeline there is one of these states that is as good, unless a stage of free layers alone becomes empty.
    ValueError if these are too many as well.
    """
    is_free = [
        not any((layer.seconds, layer.parameter_bytes, layer.kept_bytes, layer.activation_bytes))
        for layer in profile.layers
    ]
    # By layer: the layers with costs that it reads, also through free ones.
    needs: list[int] = []
    for of_layer in inputs:
        read = [at for at in range(len(needs)) if of_layer >> at & 1]
        needs.append(reduce(or_, (needs[at] if is_free[at] else 1 << at for at in read), 0))
    costly = {at: needs[at] for at in range(len(needs)) if not is_free[at]}
    free = [at for at in range(len(needs)) if is_free[at]]
    sets = _down_sets(costly)
    if sets is None:
        raise ValueError(
            f"the profile's parallel branches can be cut in more than {MOST_STATES} ways, the most that are "
            f"searched: {what_to_merge(costly, [layer.name for layer in profile.layers])}"
        )
    early = [state | sum(1 << at for at in free if not needs[at] & ~state) for state in sets[1:]]
    return (0, *sorted(early, key=int.bit_count))
