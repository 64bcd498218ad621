"""Names in files, such as traces and costs, that are older than those in the code, and stay."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_IN_FILES = {"head": "vocabulary", "splits_head": "shares_vocabulary"}


def in_files(name: str) -> str:
    """Return the name that the field ``name`` of a dataclass has in files."""
    return _IN_FILES.get(name, name)


def as_written(value: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of ``value``, nested ones too, by their names in files."""
    return asdict(value, dict_factory=lambda fields: {in_files(name): field for name, field in fields})
