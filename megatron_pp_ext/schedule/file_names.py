"""Names in files of costs, traces and rehearsals that are older than those in the code, and stay."""

_IN_FILES = {"head": "vocabulary", "splits_head": "shares_vocabulary"}


def in_files(name: str) -> str:
    """Return the name that the field ``name`` of a dataclass has in files."""
    return _IN_FILES.get(name, name)
