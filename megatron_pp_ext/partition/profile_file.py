"""Reading a profile from a file, whichever of the two forms it has."""

from pathlib import Path

from megatron_pp_ext.partition import graph_txt
from megatron_pp_ext.partition.profile import Profile, read_json


def read(path: str | Path) -> Profile:
    """The profile in ``path``: JSON if it begins with a brace, else PipeDream's ``graph.txt``.

    ValueError, naming the file, for anything that is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return read_json(text) if text.lstrip().startswith("{") else graph_txt.read(text)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text: give a JSON profile or PipeDream's graph.txt") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
