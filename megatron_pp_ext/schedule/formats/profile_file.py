"""Profiles of layers as files: JSON, in model order, or PipeDream's ``graph.txt`` (see ``graph_txt``).

    {"layers": [{"name": "embedding", "forward_seconds": 0.0002, "backward_seconds": 0.0004,
                 "activation_bytes": 4194304, "parameter_bytes": 1048576, "saved_bytes": 4325376,
                 "symbol": "E"}, ...],
     "edges": [["embedding", "layer 1"], ...]}

The names are those of ``ProfiledLayer``.  ``saved_bytes`` and ``symbol`` may be left out, and ``edges`` where
the layers are a chain.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_pp_ext.files import read_text, write_json
from megatron_pp_ext.json_input import STRICT, naming, parse_as
from megatron_pp_ext.schedule.formats import graph_txt
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer


def write(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path`` as JSON."""
    rows = [
        {name: value for name, value in asdict(layer).items() if value not in (None, "")}
        for layer in profile.layers
    ]
    content: dict[str, Any] = {"layers": rows}
    if not profile.is_chain:
        content["edges"] = [[profile.layers[a].name, profile.layers[b].name] for a, b in profile.edges]
    write_json(path, content)


def read(path: str | Path) -> Profile:
    """Return the profile in ``path``: JSON if it begins with a brace, else PipeDream's ``graph.txt``.

    ValueError, naming the file, for anything that is neither.
    """
    with naming(path):
        try:
            text = read_text(Path(path))
        except UnicodeDecodeError:
            raise ValueError("not a text: give a JSON profile or PipeDream's graph.txt") from None
        profile = _read_json(text) if text.lstrip().startswith("{") else graph_txt.read(text)
        if len(profile.layers) > 1 and not profile.edges:
            raise ValueError(
                f"no edges, so that none of {len(profile.layers)} layers reads another: write an edge for "
                "each that does, in graph.txt with a tab before 'node1 -- node2'"
            )
        return profile


@dataclass(frozen=True, slots=True)
class _Content:
    __pydantic_config__: ClassVar = STRICT

    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[str, str], ...] | None = None


def _read_json(text: str) -> Profile:
    content = parse_as(_Content, text, "write {'layers': [...]}")
    if content.edges is None:
        return Profile.chain(content.layers)
    return Profile.graph(content.layers, content.edges)
