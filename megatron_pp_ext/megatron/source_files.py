"""The parameters of functions as their source has them, of packages that are not imported for it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class SourceFiles:
    """The Python files below a folder, by the names of their modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str) -> tuple[ast.Module, str] | None:
        """Return the source of a module and the package that its relative imports are from; None without."""
        for root in ("", "src/"):
            path = root + name.replace(".", "/")
            for file, package in ((f"{path}.py", name.rpartition(".")[0]), (f"{path}/__init__.py", name)):
                text = self.text(file)
                if text is not None:
                    return ast.parse(text), package
        return None

    def text(self, path: str) -> str | None:
        """Return the text of the file ``path`` below the folder; None where there is none."""
        file = self.folder / path
        return file.read_text(encoding="utf-8") if file.exists() else None


def parameters_in(source: SourceFiles, place: str) -> str | None:
    """Return the parameters of what stands in ``place``, separated by spaces; None if nothing does."""
    module, _, name = place.partition(":")
    first, *inner = name.split(".")
    definition = _exported(source, module, first)
    for part in inner:
        definition = _named(definition, part)
    if isinstance(definition, ast.ClassDef):  # an autograd function
        definition = _named(definition, "forward")
    if definition is None:
        return None
    arguments = definition.args
    ordered = [
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    ]
    names = [argument.arg for argument in ordered if argument is not None]
    is_of_class = any(
        isinstance(node, ast.Name) and node.id == "classmethod" for node in definition.decorator_list
    )
    return " ".join(names[is_of_class:])


def _exported(source: SourceFiles, module: str, name: str) -> Any:
    """Return the function or class that a module has under ``name``, its own or one that it imports."""
    read = source.module(module)
    if read is None:
        return None
    tree, package = read
    definition = _named(tree, name)
    for node in ast.walk(tree) if definition is None else ():
        if definition is None and isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    definition = _exported(source, origin, alias.name)
                elif alias.name == "*":
                    definition = definition or _exported(source, origin, name)
    return definition


def _named(scope: ast.AST | None, name: str) -> Any:
    """Return the function or class ``name`` of ``scope``, the last of several, as Python does."""
    defined = (
        [definition for definition in _definitions(scope) if definition.name == name]
        if scope is not None
        else []
    )
    return defined[-1] if defined else None


def _definitions(scope: ast.AST) -> Iterator[Any]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _definitions(node)
