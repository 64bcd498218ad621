"""Copies of the project in which one file at a time is changed, while tests run that should notice."""

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "megatron_pp_ext"
COPIED = ("megatron_pp_ext", "tests", "benchmarks", "reference", "docs", "examples", "scripts")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")

TIMEOUT = 1800.0
"""Seconds after which tests count as failed; ranks that a defect makes hang end by themselves before."""
NOTHING_RUN = 5
"""The exit status of pytest where all tests are wide."""


class Copies:
    """As many copies as there are cores, each for one change at a time."""

    def __init__(self, folder: Path) -> None:
        self._number = os.cpu_count() or 1
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(self._number):
            self._free.put(copied(folder / str(number)))

    def failure(
        self,
        tests: Sequence[str],
        path: str | None = None,
        source: str = "",
        timeout: float = TIMEOUT,
        **environment: str,
    ) -> str:
        """Run ``tests`` until one fails, with ``source`` in the file ``path``; return the end of their words.

        "" if all pass.  Tests that cannot be run, or take longer than ``timeout``, fail.  ValueError if all
        of them are wide.
        """
        folder = self._free.get()
        try:
            if path is None:
                return _failure(folder, tests, timeout, environment)
            before = (folder / path).read_text(encoding="utf-8")
            (folder / path).write_text(source, encoding="utf-8")
            try:
                return _failure(folder, tests, timeout, environment)
            finally:
                (folder / path).write_text(before, encoding="utf-8")
        finally:
            self._free.put(folder)

    def each[T, R](self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield what ``function`` returns for ``items``, in their order, of which each core does one."""
        with ThreadPoolExecutor(self._number) as threads:
            yield from threads.map(function, items)


@contextmanager
def copies() -> Iterator[Copies]:
    """Make copies of the project, and remove them."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield Copies(Path(folder))


def copied(folder: Path) -> Path:
    """Copy to ``folder`` what tests need; bytecode there is checked by its source, whatever the time."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    compileall.compile_dir(folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


def _failure(folder: Path, tests: Sequence[str], timeout: float, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {timeout:g} seconds"
    if run.returncode == NOTHING_RUN:
        raise ValueError(f"make test runs none of {' '.join(tests)}; name a test that is not wide")
    return f"exit status {run.returncode}:\n{run.stdout[-2000:]}" if run.returncode else ""
