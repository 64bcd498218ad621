"""Every hook fits every commit that was tried, by the table of parameters that is kept of them."""

import json

import pytest

from megatron_pp_ext.megatron import core_hooks, frameworks, hooks, install, patching, releases
from megatron_pp_ext.megatron.source_files import SourceFiles, parameters_in
from scripts import tried_commits

MEGATRONS = [commit for commit in patching.commits() if commit.is_megatron]
FRAMEWORKS = [commit for commit in patching.commits() if not commit.is_megatron]
PACKAGES = {"Megatron-Bridge": "megatron.bridge.", "ms-swift": "swift.", "verl": "verl."}


def number(version: str) -> releases.Number:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@pytest.mark.parametrize("commit", MEGATRONS, ids=lambda commit: commit.name)
def test_hooks_fit(commit: patching.Commit) -> None:
    release = number(commit.version)
    (row,) = (row for row in releases.RELEASES if row.number == release)
    for hook in hooks.all_hooks(cpu=True) if row.by_flags else core_hooks.INSTALLED:
        hook.in_megatron(patching.signatures(commit.name).get, release)


@pytest.mark.parametrize("commit", FRAMEWORKS, ids=lambda commit: commit.name)
def test_hooks_into_frameworks_fit(commit: patching.Commit) -> None:
    package = PACKAGES[commit.repository.partition("/")[2]]
    hooks_of_package = [
        hook for hook in (*frameworks.HOOKS, *frameworks.LOGS) if hook.places[0].path.startswith(package)
    ]
    assert hooks_of_package
    for hook in hooks_of_package:
        assert hook.in_megatron(patching.signatures(commit.name).get, number(commit.version))


def test_what_hooks_know_is_in_some_commit() -> None:
    """No hook knows parameters that were never seen; a commit that is dropped takes them with it."""
    seen = {
        (place, found) for one in patching.commits() for place, found in patching.signatures(one.name).items()
    }
    for hook in (*hooks.all_hooks(cpu=True), *frameworks.HOOKS, *frameworks.LOGS):
        for place in hook.places:
            found = [parameters for path, parameters in seen if path == place.path]
            for known in place.known:
                alone = patching.Place(place.path, (known,), place.ordered)
                assert any(_fits(alone, parameters) for parameters in found), (place.path, known)


def _fits(place: patching.Place, parameters: str) -> bool:
    try:
        place.require(parameters)
    except patching.HookError:
        return False
    return True


def test_the_table_has_what_python_finds() -> None:
    """The table is read from source; the installed Megatron is one of its commits."""
    every = {place.path for hook in hooks.all_hooks(cpu=True) for place in hook.places}
    patching.undo()
    found = {path: patching.parameters_here(path) for path in every}
    install(cpu=True)
    version = releases.megatron_version().partition("+")[0]
    assert version in [commit.version for commit in patching.agreeing(found)]


def test_the_nearest_commit_is_the_newest_of_those_that_differ_least() -> None:
    found = dict(patching.signatures("main"))
    assert patching.closest(found).name == "main"
    found["megatron.core.pipeline_parallel.schedules:backward_step"] = "colour"
    assert patching.agreeing(found) == []
    assert patching.closest(found).name == "main"


SOURCES = {
    "package/__init__.py": "from .part import moved as here\nfrom package.star import *\n",
    "package/part.py": "def moved(a, *others, b=1, **more): ...\n",
    "package/star.py": "try:\n    import torch\nexcept ImportError:\n    def shown(x): ...\n",
    "package/classes.py": (
        "class Linear(Function):\n    @staticmethod\n    def forward(ctx, input): ...\n"
        "class Manager:\n    @classmethod\n    def instance(cls, size): ...\n"
    ),
}


@pytest.mark.parametrize(
    ("place", "parameters"),
    [
        ("package:here", "a others b more"),
        ("package:shown", "x"),
        ("package.classes:Linear", "ctx input"),
        ("package.classes:Manager.instance", "size"),
        ("package.classes:Manager.gone", None),
        ("package.gone:here", None),
    ],
)
def test_parameters_are_read_without_importing(tmp_path, place: str, parameters: str | None) -> None:
    (tmp_path / "package").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    assert parameters_in(SourceFiles(tmp_path), place) == parameters


def test_the_table_is_written_as_it_is_read() -> None:
    commits = json.loads(patching.FILE.read_text())["commits"]
    tables = {name: dict(patching.signatures(name)) for name in commits}
    assert tried_commits.written(commits, tables) == patching.FILE.read_text()
