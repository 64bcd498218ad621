"""Finds which layers to merge where a graph has too many parallel branches to be cut."""

from collections.abc import Mapping, Sequence

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
