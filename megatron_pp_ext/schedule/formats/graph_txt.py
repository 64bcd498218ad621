"""Profiles as PipeDream's profiler writes them (``graph.txt`` in github.com/msr-fiddle/pipedream).

The file has one line for each layer, with times in milliseconds, sizes in bytes, and several outputs in
brackets, and one line for each edge, which begins with a tab:

    node2 -- LSTM(...) -- forward_compute_time=2.2, backward_compute_time=4.5, activation_size=[6.0; 1.0], ...
    \tnode2 -- node3

The fourth field is ``parameter_size``.

As in PipeDream's optimizer, nodes that only stand for the data are left out: a node called
``Input...`` that reads nothing, and a node called ``__getitem__...`` that nothing reads.
"""

from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer

_FIELDS = {
    "forward_compute_time": 1e-3,
    "backward_compute_time": 1e-3,
    "activation_size": 1.0,
    "parameter_size": 1.0,
}
"""The fields, and the factors that convert them to seconds and bytes."""


def read(text: str) -> Profile:
    """Return the profile in ``text``; ValueError, naming line or layer, for anything that is not as above."""
    layers: dict[str, ProfiledLayer] = {}
    kinds: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line.startswith("\t"):
            if len(words) != 2:
                raise ValueError(f"line {number}: {line.strip()!r} is no edge: write 'node1 -- node2'")
            edges.append((words[0], words[1]))
            continue
        if len(words) < 3:
            raise ValueError(
                f"line {number}: {line.strip()!r} is no layer: write 'node1 -- name -- fields', and a tab "
                "before an edge"
            )
        if words[0] in layers:
            raise ValueError(f"line {number}: {words[0]} comes twice: names must differ, rename one")
        layers[words[0]] = _layer(words[0], words[2])
        kinds[words[0]] = words[1]
    readers, read_ones = {a for a, _ in edges}, {b for _, b in edges}
    data = {
        name
        for name, kind in kinds.items()
        if (kind.startswith("Input") and name not in read_ones)
        or (kind.startswith("__getitem__") and name not in readers)
    }
    return Profile.graph(
        [layer for name, layer in layers.items() if name not in data],
        [(a, b) for a, b in edges if a not in data and b not in data],
    )


def _layer(name: str, text: str) -> ProfiledLayer:
    fields = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    values = []
    for field, unit in _FIELDS.items():
        if field not in fields:
            raise ValueError(f"layer {name!r}: {field} is missing: add it or profile again")
        try:
            values.append(unit * sum(float(word) for word in fields[field].strip("[]").split(";")))
        except ValueError:
            raise ValueError(
                f"layer {name!r}: {field} is {fields[field]!r}, but must be a number: profile again"
            ) from None
    forward, backward, activation, parameter = values
    return ProfiledLayer(name, forward, backward, activation, parameter)
