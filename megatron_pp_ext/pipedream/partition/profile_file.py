"""Reads a profile from a file in either of its two forms."""

from pathlib import Path

from megatron_pp_ext.files import read_text
from megatron_pp_ext.json_input import naming
from megatron_pp_ext.pipedream.partition import graph_txt
from megatron_pp_ext.pipedream.partition.profile import Profile, read_json


def read(path: str | Path) -> Profile:
    """Return the profile in ``path``: JSON if it begins with a brace, else PipeDream's ``graph.txt``.

    ValueError, naming the file, for anything that is neither.
    """
    with naming(path):
        try:
            text = read_text(Path(path))
        except UnicodeDecodeError:
            raise ValueError("not a text: give a JSON profile or PipeDream's graph.txt") from None
        profile = read_json(text) if text.lstrip().startswith("{") else graph_txt.read(text)
        if len(profile.layers) > 1 and not profile.edges:
            raise ValueError(
                f"no edges, so that none of {len(profile.layers)} layers reads another: write an edge for "
                "each that does, in graph.txt with a tab before 'node1 -- node2'"
            )
        return profile
