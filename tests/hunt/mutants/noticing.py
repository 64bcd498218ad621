"""Whether the tests of a room notice a mutant: each is tried in a fork that has not imported the room yet.

The tests that reach the changed line run first to last by how long they take, until one fails.  A mutant that
makes them take far longer than they do without it, or far more memory, counts as noticed.

Who asks for it has the loops that numba compiles run as Python (NUMBA_DISABLE_JIT): coverage does not reach
compiled code, and to compile a mutant takes longer than most tests.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import coverage
import pytest
from hypothesis import Phase, settings

from tests.hunt.mutants.mutations import Mutant

LONGEST = 2.0
"""Seconds of the processor: tests that take longer are left to ``make test``."""

_COMPILED = 300
"""Seconds of the processor after which tests of compiled loops count as failed; they take a tenth of it."""

_MEMORY = 4 << 30
"""Bytes that a mutant may take beyond what the process has already."""

_LIBRARIES = ("numpy", "torch", "ortools.sat.python.cp_model")
"""What the tests of these rooms import and what takes long."""


@dataclass
class Reached:
    """The tests that reach each line of each file, and the seconds that each takes."""

    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests to run for ``mutant``: for a line that runs at import alone, those of the room."""
        of_file = self.lines.get(mutant.file, {})
        # Some lines of a statement over several may have no code of their own.
        line = max((line for line in of_file if line <= mutant.line), default=0)
        found = of_file.get(line, [])
        known = self.seconds if found == [""] else found
        return sorted(
            (test for test in known if test in self.seconds), key=lambda test: (self.seconds[test], test)
        )


def reached(root: Path, package: str, tests: Sequence[str], interpreted: bool = False) -> Reached:
    """Run ``tests``, folders or files, once without a mutant; RuntimeError if they fail.

    With ``interpreted`` no loop is compiled.
    """

    def work() -> Reached | None:
        cover = coverage.Coverage(data_file=None, include=[f"{root}/{package}/*"], config_file=False)
        plugin = _Durations(cover)
        _have_loops_interpreted(interpreted)
        cover.start()
        failed = _pytest(tests, plugin)
        cover.stop()
        data = cover.get_data()
        found = Reached(seconds={test: took for test, took in plugin.seconds.items() if took <= LONGEST})
        for path in data.measured_files():
            by_line = {line: sorted(set(at)) for line, at in data.contexts_by_lineno(path).items()}
            found.lines[str(Path(path).relative_to(root))] = by_line
        return None if failed else found

    for library in _LIBRARIES:
        importlib.import_module(library)
    result = _forked(work, 3600)
    if not isinstance(result, Reached):
        raise RuntimeError(f"the tests fail without a mutant: {' '.join(tests)}")
    return result


def is_noticed_compiled(root: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether any of ``tests`` fails with all loops compiled anew: code that is kept is of the sources."""

    def work() -> bool:
        with tempfile.TemporaryDirectory(prefix="loops-") as folder:
            os.environ["NUMBA_CACHE_DIR"] = folder
            sys.meta_path.insert(0, _Instead(root, mutant))
            return _pytest(tests, _Quick())

    return _forked(work, _COMPILED) is not False


def is_noticed(root: Path, mutant: Mutant, tests: Reached, interpreted: bool = False) -> bool:
    """Whether any of the tests that reach ``mutant`` fails with it; ``interpreted`` is as in ``reached``."""
    chosen = tests.tests(mutant)
    if not chosen:
        return False
    expected = sum(tests.seconds[test] for test in chosen)

    def work() -> bool:
        _have_loops_interpreted(interpreted)
        sys.meta_path.insert(0, _Instead(root, mutant))
        return _pytest(chosen, _Quick())

    return _forked(work, int(10 + 5 * expected)) is not False


def _have_loops_interpreted(yes: bool) -> None:
    """Decide for this process, which has not imported numba yet."""
    os.environ["NUMBA_DISABLE_JIT"] = str(int(yes))


def _pytest(arguments: Sequence[str], *plugins: object) -> bool:
    """Run pytest until a test fails, and return whether one did."""
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header"]
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return pytest.main([*options, *arguments], plugins=list(plugins)) != 0


def _forked(work: Callable[[], Any], seconds: int) -> Any:
    """Return what ``work`` returns in a fork, or None if that ends by a limit or an error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            signal.alarm(20 * seconds)
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.gettempdir()
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(work(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(answer) if status == 0 else None


class _Instead(SourceFileLoader):
    """Finds and loads the mutant in place of its module."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        parts = Path(mutant.file).with_suffix("").parts
        self._source = mutant.source
        super().__init__(".".join(part for part in parts if part != "__init__"), str(root / mutant.file))

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(name, self.path, loader=self)
            if name == self.name
            else None
        )

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Quick:
    """Draws the same examples each time, and spends no time on making a failing one small."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, phases=phases, database=None)
        settings.load_profile("mutants")


class _Durations(_Quick):
    """Measures each test, and tells coverage which one is running.

    ``seconds`` are of the processor, so that they say little of how busy the machine is.
    """

    def __init__(self, cover: coverage.Coverage) -> None:
        self.seconds: dict[str, float] = {}
        self._cover = cover

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._cover.switch_context(item.nodeid)
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = sum(os.times()[:4]) - before
            self._cover.switch_context("")
