"""Where functions, classes and assigned names are defined, found by name in whatever file they are."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Lines ``first`` to ``last`` of a file, counted from 1; decorators belong to what they decorate."""

    file: Path
    first: int
    last: int

    @property
    def text(self) -> str:
        """The lines themselves."""
        return self.parts(self.file.read_text(encoding="utf-8"))[1]

    def parts(self, source: str) -> tuple[str, str, str]:
        """Return what ``source`` has in front of the place, in it, and behind it."""
        lines = source.splitlines(keepends=True)
        return (
            "".join(lines[: self.first - 1]),
            "".join(lines[self.first - 1 : self.last]),
            "".join(lines[self.last :]),
        )


@cache
def symbols(file: Path) -> dict[str, list[Place]]:
    """Return where ``file`` defines each symbol, by its dotted name; "" is the whole file."""
    source = file.read_text(encoding="utf-8")
    found = {"": [Place(file, 1, len(source.splitlines()))]}
    for name, node in _definitions(ast.parse(source), ""):
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        found.setdefault(name, []).append(Place(file, first, node.end_lineno or first))
    return found


def places(package: Path, module: str, name: str) -> list[Place]:
    """Return where ``package`` defines ``name``: in ``module`` if that has it, otherwise wherever it is."""
    path = package.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists() and name in symbols(file):
            return symbols(file)[name]
    return [place for file in sorted(package.rglob("*.py")) for place in symbols(file).get(name, ())]


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each definition below ``parent`` with its dotted name; what functions assign is theirs alone."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield prefix + node.name, node
                inside = _definitions(node, f"{prefix}{node.name}.")
                is_function = isinstance(node, ast.FunctionDef)
                yield from (one for one in inside if not (is_function and _is_assignment(one[1])))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node
            case ast.stmt():
                yield from _definitions(node, prefix)


def _is_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)
