"""The single changes that mutmut's operators make to a file, anywhere in it.

Beside functions these are properties and tables at the top of a module, which ``mutmut run`` leaves out.
Texts are left as they are, and so are annotations and decorators.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from mutmut.mutation.mutators import mutation_operators


@dataclass(frozen=True)
class Mutant:
    """A file with one change: ``before`` and ``after`` are its lines that differ, the first at ``line``."""

    file: str
    line: int
    before: str
    after: str
    source: str


class _Places(cst.CSTVisitor):
    """Collects (node, what an operator puts in its place) for the whole of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.ImportFrom | cst.Import | cst.BaseString):
            return isinstance(node, cst.FormattedString | cst.ConcatenatedString)
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.found += [(node, other) for other in operator(node)]
        return True


def mutants(root: Path, file: str, chosen: Sequence[int] | None = None) -> list[Mutant]:
    """Return the mutants of ``file`` below ``root``, or those of the ``chosen`` numbers."""
    source = (root / file).read_text(encoding="utf-8")
    module = cst.parse_module(source)
    places = _Places()
    module.visit(places)
    numbers = range(len(places.found)) if chosen is None else chosen
    made = (module.deep_replace(*places.found[number]) for number in numbers)
    return [_mutant(file, source, other.code) for other in made]


def count(root: Path, file: str) -> int:
    """Return the number of mutants of ``file``."""
    places = _Places()
    cst.parse_module((root / file).read_text(encoding="utf-8")).visit(places)
    return len(places.found)


def _mutant(file: str, source: str, changed: str) -> Mutant:
    old, new = source.splitlines(), changed.splitlines()
    spans = [
        span for span in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if span[0] != "equal"
    ]
    first, last = spans[0], spans[-1]
    return Mutant(
        file, first[1] + 1, _joined(old[first[1] : last[2]]), _joined(new[first[3] : last[4]]), changed
    )


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)
